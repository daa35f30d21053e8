"""Configs over small shards."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.schema.data import DataConfig


@pytest.fixture
def data(tmp_path, write_shards) -> Callable[..., DataConfig]:
    """A DataConfig over streams of the given sizes."""
    made: dict[str, Path] = {}

    def make(sizes: dict[str, int], proportions: dict[str, float] | None = None, **options) -> DataConfig:
        for name, size in sizes.items():
            if name not in made:
                made[name] = write_shards(tmp_path / name, size)
        streams = {name: {"local": str(made[name]), "proportion": (proportions or {}).get(name)} for name in sizes}
        values = {"seq_len": 8, "train": {"streams": streams}, "num_canonical_nodes": 4, "num_workers": 0}
        return DataConfig.model_validate(values | options)

    return make
