# Sourced on a machine that has torch but not the rest: installs the wheels carried in .whl beside it.
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$HOME/site" .whl/*.whl
export PYTHONPATH="$HOME/site:$PWD" PYTHONUNBUFFERED=1
