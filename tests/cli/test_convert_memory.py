"""Export and import hold a few pieces of the model, never the model."""

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.programs.models import conversion
from llmtrain.convert.lazy_checkpoint import PIECE_BYTES
from llmtrain.models.hf.family import family_for_model
from llmtrain.models.hf.hf_checkpoint import open_hf_checkpoint
from tests.support import checkpoints

ROOT = Path(__file__).parents[2]

SIZES = {
    # 300 MB of fp32, whose largest tensor is 38 MB; files of 40 MB.
    "300 MB": (checkpoints.mpt(768, 9, 12_500), "40MB"),
    # 2.2 GB, 98 MB; files of 100 MB.
    "2 GB": (checkpoints.mpt(1536, 19, 16_000), "100MB"),
    # 1.7 GB, 66 MB; files of 70 MB.
    "Nemotron-H, 2 GB": (checkpoints.nemotron_h(1536, 10, 10_700), "70MB"),
}


@pytest.mark.ci
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
    for name, saved in {"tiny": checkpoints.mpt(32, 1, 300), "large": config}.items():
        checkpoints.save(tmp_path / name, saved)
    peaks = []
    for verb, old, new, options in (
        ("export", "", "-out", ["--max-shard-size", limit, "--dtype", dtype]),
        ("import", "-out", "-again", []),
    ):
        tiny, large = ([verb, tmp_path / f"{name}{old}", tmp_path / f"{name}{new}"] for name in ("tiny", "large"))
        peaks.append(conversion.convert(tiny, [*large, *options])["peak_bytes"])
    exporting, importing = peaks

    largest = max(file.stat().st_size for file in (tmp_path / "large-out").glob("model-*.safetensors"))
    assert 2 * largest < total / 3
    assert exporting <= 2 * largest
    assert exporting <= 96e6  # whatever the model: 34 MB were seen, once above 64
    published = open_hf_checkpoint(tmp_path / "large-out")
    tensor = max(published[name].nbytes for name in published)
    assert importing <= 2 * tensor + 3 * PIECE_BYTES


def test_checkpoints_of_any_size_are_compared_number_by_number(tmp_path):
    for name, filled in (("one", 0.5), ("other", 0.25)):
        values = partial(conversion.random_runs, filled)
        conversion.make_checkpoint(tmp_path / name, checkpoints.mpt(64, 1, 2048), values)
    conversion.punch_holes(tmp_path / "one")
    assert conversion.equal(tmp_path / "one", tmp_path / "one")
    assert not conversion.equal(tmp_path / "one", tmp_path / "other")


@pytest.mark.slow
def test_the_measurement_of_a_small_nemotron_h(tmp_path, capsys):
    smaller = ["model.layers=mamba_mlp mamba attn_mlp", "model.d_model=256", "model.vocab_size=2048"]
    smaller += [f"model.blocks.{block}.mlp.d_ff=512" for block in ("mamba_mlp", "attn_mlp")]
    file, folder = str(ROOT / "yamls/pretrain/nemotron-h-8b.yaml"), tmp_path / "measured"
    options = ["--filled", "0.5", "--max-shard-size", "2MB", "--out", str(tmp_path / "rows.json")]
    status = conversion.main([file, str(folder), *smaller, *options])
    assert capsys.readouterr().out.splitlines()[-1] == "what came back is the same"
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert status == int(any(row["memory_mb"] > 1e3 * row["bound_gb"] for row in rows))
    table = open_hf_checkpoint(folder / "exported")["backbone.embeddings.weight"].flatten()
    assert table[: conversion.RUN // 2].any() and not table[conversion.RUN // 2 : conversion.RUN].any()
