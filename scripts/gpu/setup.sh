# shellcheck shell=bash
# Sourced on a machine that has torch but not the rest: installs the wheels carried in .whl, once for each set of them.
_wheels=$HOME/site/.$(cd .whl && echo -- *.whl | cksum | cut -d ' ' -f 1)
if [[ ! -e $_wheels ]]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$HOME/site" .whl/*.whl &&
        touch "$_wheels"
fi
unset PYTHONDONTWRITEBYTECODE # or each process would compile all that it imports, for ten seconds
export PYTHONPATH="$HOME/site:$PWD" PYTHONUNBUFFERED=1
