"""Files that are read: regular ones, of limited size and depth."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from llmtrain.checkpoint.format.header import HeaderError
from llmtrain.checkpoint.format.manifest import hash_file
from llmtrain.checkpoint.format.tensor_file import TensorSource
from llmtrain.config import regular_file
from llmtrain.config.regular_file import read_bytes, read_json, read_text
from llmtrain.convert.composer import FileTensors, is_composer_checkpoint
from llmtrain.convert.dcp import DcpTensors, read_metadata
from llmtrain.data.tokenize.tokenizer import load_tokenizer
from llmtrain.errors import UserError
from llmtrain.models.hf.hf_checkpoint import open_hf_checkpoint


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(OSError, match="not a regular file"):
            read_bytes(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)


def test_a_file_beyond_the_limit_is_refused_unread(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(regular_file.MOST_BYTES + 1)
    with pytest.raises(OSError, match="has more than"):
        read_bytes(tmp_path / "sparse")


def test_json_that_is_nested_too_deep_is_an_error_of_the_text(tmp_path):
    (tmp_path / "deep").write_text("[" * 300_000)
    with pytest.raises(ValueError, match="nested too deep"):
        read_json(tmp_path / "deep")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    dcp.save({"state": {"model": {"w": torch.ones(4)}}}, checkpoint_id=folder, no_dist=True)
    return folder


def elements(sharded: Path, file: Path) -> None:
    """Read a distributed checkpoint whose one file of tensors is `file`."""
    shutil.copy(sharded / ".metadata", file.parent)
    list(DcpTensors(file.parent).elements("state.model.w", [4]))


READERS: dict[str, Callable[[Path, Path], object]] = {
    "model.safetensors": lambda sharded, file: open_hf_checkpoint(file.parent),
    "model.safetensors.index.json": lambda sharded, file: open_hf_checkpoint(file.parent),
    "pytorch_model.bin": lambda sharded, file: open_hf_checkpoint(file.parent),
    "config.json": lambda sharded, file: open_hf_checkpoint(file.parent),
    "ep0-ba1-rank0.pt": lambda sharded, file: FileTensors(file),
    ".metadata": lambda sharded, file: is_composer_checkpoint(file.parent) and read_metadata(file.parent),
    "__0_0.distcp": elements,
    "tokenizer.json": lambda sharded, file: load_tokenizer(file.parent),
    "rank0.safetensors": lambda sharded, file: TensorSource(file),
    "step.txt": lambda sharded, file: hash_file(file),
}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda file: file.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "empty": Path.touch,
}


CASES = [(name, damage) for name in READERS for damage in DAMAGES if (name, damage) != ("step.txt", "empty")]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_no_reader_waits_for_what_is_no_file_or_believes_an_empty_one(tmp_path, sharded, name, damage):
    if "model." in name:
        (tmp_path / "config.json").write_text("{}")
    DAMAGES[damage](tmp_path / name)
    with pytest.raises((UserError, OSError)) as raised:
        READERS[name](sharded, tmp_path / name)
    where = "it" if isinstance(raised.value, HeaderError) else tmp_path.name
    assert where in str(raised.value)
