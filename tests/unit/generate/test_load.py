"""Models out of checkpoints: what is refused before anything is built."""

from pathlib import Path

import pytest

from llmtrain.checkpoint.format.manifest import CheckpointError, Manifest
from llmtrain.generate.load import checkpoint_model_config


def manifest(model: dict) -> Manifest:
    return Manifest(save_id="a", step=1, tokens=1, config={"model": model}, clock={}, data={}, versions={}, files={})


MODEL = {"vocab_size": 64, "d_model": 32, "blocks": {"x": {"type": "attention", "n_heads": 2}}, "layers": "x"}


def test_the_model_section_of_a_checkpoint():
    assert checkpoint_model_config(Path("run"), manifest(MODEL)).d_model == 32


def test_a_block_type_of_another_version_is_named():
    other = {**MODEL, "blocks": {"x": {"type": "retention", "n_heads": 2}}}
    with pytest.raises(CheckpointError) as caught:
        checkpoint_model_config(Path("run"), manifest(other))
    assert "another version of llmtrain" in str(caught.value) and "model.blocks.x" in str(caught.value)
