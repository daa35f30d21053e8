"""The index: the tensors of a checkpoint, and the file of each of their pieces. No torch here.

It takes the place of the pickled `.metadata` of torch's distributed checkpoint. It is JSON: nothing is executed to read it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from llmtrain.checkpoint.format.manifest import CheckpointError, FileRecord, Manifest
from llmtrain.config.output_folder import write_synced
from llmtrain.config.regular_file import parse_json, read_bytes

NAME = "index.json"


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: its offsets and sizes there, and the tensor `key` of a safetensors file that holds it."""

    offsets: list[int]
    sizes: list[int]
    file: str
    key: str


@dataclass(frozen=True)
class TensorRecord:
    """shape: of the whole tensor. dtype: as safetensors names it."""

    dtype: str
    shape: list[int]
    pieces: list[Piece] = field(default_factory=list)


@dataclass(frozen=True)
class Index:
    """tensors, values: by name, which begins with `model.`, `optimizer.`, `ema.` or `spike.`; values are no tensors, such as
    learning rates."""

    save_id: str
    tensors: dict[str, TensorRecord]
    values: dict[str, Any]

    def files(self, names: Mapping[str, object] | None = None) -> list[str]:
        """Names of the files that hold these tensors; of all files by default."""
        chosen = self.tensors if names is None else [name for name in names if name in self.tensors]
        return sorted({piece.file for name in chosen for piece in self.tensors[name].pieces})


def require_average(folder: Path, index: Index) -> None:
    """Raise CheckpointError unless a checkpoint has moving averages of weights."""
    if not any(name.startswith("ema.") for name in index.tensors):
        raise CheckpointError(f"{folder} has no moving average of the weights: its run was trained without train.ema")


def write(folder: Path, index: Index) -> FileRecord:
    content = json.dumps(asdict(index), separators=(",", ":")).encode()
    write_synced(folder / NAME, content)
    return {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}


def read(folder: Path, manifest: Manifest) -> Index:
    """Read the index. Raises CheckpointError unless it is the one that was written with this manifest."""
    if NAME not in manifest.files:
        raise CheckpointError(f"{folder} is incomplete: its manifest does not list {NAME}")
    try:
        content = read_bytes(folder / NAME)
    except OSError as error:
        raise CheckpointError(f"{folder}: {NAME} cannot be read: {error}") from None
    # The index is small, and damage to it has puzzling effects: its hash is compared even if those of the tensors are not.
    if xxhash.xxh3_128_hexdigest(content) != manifest.files[NAME]["xxh3_128"]:
        raise CheckpointError(f"{folder} is damaged: {NAME} is not what was written (its xxh3_128 differs)")
    try:
        fields = parse_json(content)
        tensors = {
            name: TensorRecord(record["dtype"], record["shape"], [Piece(**piece) for piece in record["pieces"]])
            for name, record in fields["tensors"].items()
        }
        index = Index(fields["save_id"], tensors, fields["values"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder / NAME} is not a checkpoint's index: {error}") from None
    for name in index.files():
        if name not in manifest.files:  # also what keeps a path from leaving the folder
            raise CheckpointError(f"{folder / NAME} names the file {name}, which the manifest does not list")
    if index.save_id != manifest.save_id:
        raise CheckpointError(f"{folder} holds mixed saves: {NAME} belongs to the save {index.save_id}")
    return index
