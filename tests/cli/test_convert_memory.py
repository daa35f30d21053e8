"""Export and import hold a few pieces of the model, never the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.convert.export import export
from llmtrain.convert.lazy_checkpoint import PIECE_BYTES
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import family_for_model
from llmtrain.models.hf.hf_checkpoint import open_hf_checkpoint
from tests.support import checkpoints

ROOT = Path(__file__).parents[2]

# Tiny conversions first: the peak they leave is that of the interpreter with everything imported.
PROGRAM = """
import resource, sys
from pathlib import Path
from llmtrain.cli import main

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

tiny, large, *options = sys.argv[1:]
assert main(["export", tiny, tiny + "-out"]) == main(["import", tiny + "-out", tiny + "-again"]) == 0
before = peak()
assert main(["export", large, large + "-out", *options]) == 0
exported = peak()
assert main(["import", large + "-out", large + "-again"]) == 0
print(exported - before, peak() - before)
"""


def peaks(tiny: Path, large: Path, *options: str) -> tuple[int, int]:
    """Bytes that export and import need at most, above the interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny), str(large), *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    exporting, importing = map(int, done.stdout.split()[-2:])
    return exporting, importing


SIZES = {
    # 300 MB of fp32, whose largest tensor is 38 MB; files of 40 MB.
    "300 MB": (checkpoints.mpt(768, 9, 12_500), "40MB"),
    # 2.2 GB, 98 MB; files of 100 MB.
    "2 GB": (checkpoints.mpt(1536, 19, 16_000), "100MB"),
    # 1.7 GB, 66 MB; files of 70 MB.
    "Nemotron-H, 2 GB": (checkpoints.nemotron_h(1536, 10, 10_700), "70MB"),
}


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ("300 MB", "bfloat16"),
        pytest.param("2 GB", "bfloat16", marks=pytest.mark.slow),
        pytest.param("2 GB", "float32", marks=pytest.mark.slow),
        pytest.param("Nemotron-H, 2 GB", "bfloat16", marks=pytest.mark.slow),
        pytest.param("Nemotron-H, 2 GB", "float32", marks=pytest.mark.slow),
    ],
)
def test_memory_is_bounded_by_the_largest_file(size, dtype, tmp_path):
    config, limit = SIZES[size]
    total = 4 * sum(part.size for weight in family_for_model(config).weights(config) for part in weight.parts)
    large = checkpoints.save(tmp_path / "large", config)
    tiny = checkpoints.save(tmp_path / "tiny", checkpoints.mpt(32, 1, 300))
    exporting, importing = peaks(tiny, large, "--max-shard-size", limit, "--dtype", dtype)

    largest = max(file.stat().st_size for file in (tmp_path / "large-out").glob("model-*.safetensors"))
    assert 2 * largest < total / 3
    assert exporting <= 2 * largest
    assert exporting <= 32e6  # whatever the model
    published = open_hf_checkpoint(tmp_path / "large-out")
    tensor = max(published[name].nbytes for name in published)
    assert importing <= 2 * tensor + 3 * PIECE_BYTES


def test_the_command_for_a_measurement_makes_a_7b(tmp_path):
    config = ModelConfig.model_validate(checkpoints.MPT_7B)
    weights = family_for_model(config).weights(config)
    assert sum(part.size for weight in weights for part in weight.parts) == 6_649_024_512
    blocks = "{attn: {type: attention, n_heads: 4, position: {type: alibi}, mlp: {type: gelu, d_ff: 256}}}"
    smaller = ["model.layers=attn*2", "model.d_model=64", "model.vocab_size=300", f"model.blocks={blocks}"]
    checkpoints.main(str(tmp_path / "made"), *smaller)
    export(tmp_path / "made", tmp_path / "out")
    assert open_hf_checkpoint(tmp_path / "out")["transformer.wte.weight"].eq(0).all()
