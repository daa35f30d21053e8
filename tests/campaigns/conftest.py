"""The scene of all campaigns."""

import os
from pathlib import Path

import pytest

from tests.campaigns.scene import make


@pytest.fixture(scope="session")
def scene(tmp_path_factory, shards) -> Path:
    here = Path.cwd()
    try:
        return make(tmp_path_factory.mktemp("scene"), shards)
    finally:
        os.chdir(here)
