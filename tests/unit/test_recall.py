"""benchmarks recall: its texts, and its run to a picture."""

import json

import torch

from benchmarks.programs.training import recall


def test_each_key_comes_again_once_behind_the_pairs_with_its_value_as_label():
    ids, labels = recall.draw(3, 32, torch.Generator().manual_seed(0))
    for row, wanted in zip(ids.tolist(), labels.tolist(), strict=True):
        pairs = dict(zip(row[:8:2], row[1:8:2], strict=True))
        asked = {row[at]: label for at, label in enumerate(wanted) if label >= 0}
        assert asked == pairs and all(label == -100 for label in wanted[:8])


def test_a_small_run_reaches_its_figures(tmp_path):
    args = ["--lengths", "16", "--steps", "2", "--batch", "2", "--models", "zamba2", "mamba3"]
    assert recall.main([*args, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "recall.json").read_text(encoding="utf-8"))["models"]
    assert list(found) == ["zamba2", "mamba3"] and list(found["zamba2"]["accuracy"]) == ["16", "32"]
