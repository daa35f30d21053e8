"""The storage of torch's distributed checkpoint (DCP), in safetensors and JSON.

DCP's planners say which rank writes which piece of a DTensor, and which pieces make up the shard that a rank wants, for
any number of ranks before and after. A StorageWriter and a StorageReader store the bytes; torch's own use pickle.
"""

import io
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format.divided_tensor import DividedTensor
from llmtrain.checkpoint.format.index import Index, Piece, TensorRecord
from llmtrain.checkpoint.format.manifest import FileRecord
from llmtrain.checkpoint.format.tensor_file import (
    DTYPE_NAMES,
    DTYPES,
    Entry,
    TensorFile,
    TensorSource,
    split_into_files,
)
from llmtrain.checkpoint.format.threads import in_threads

FILE_BYTES = 512 * 2**20
"""A file is closed beyond this, so that hashing and uploading have parts to share; a piece is never split."""
READ_BYTES = 64 * 2**20
"""Bytes of a piece that are in memory at a time, beside the tensor they are copied to."""
THREADS = 4


@dataclass(frozen=True)
class _Written:
    """A piece, and the file that holds it, as a rank reports them to the coordinator."""

    piece: Piece
    record: FileRecord


class StatePlanner(DefaultSavePlanner):
    """Plans with a flat state dict; the tensors' data are looked up in `data`, this rank's part of each by its name.

    The two differ in an asynchronous save: the state is planned as it is sharded, and written as it was copied.
    """

    def __init__(self, data: Mapping[str, Tensor]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._data = data

    def lookup_object(self, index: MetadataIndex) -> Any:
        planned = self.state_dict[index.fqn]
        data = self._data.get(index.fqn, planned)
        return planned.part(index, data) if isinstance(planned, DividedTensor) else data

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(object).encode())
        return object


class ShardWriter(StorageWriter):
    """Writes tensors into safetensors files and the rest into the index. files: the written ones; on the coordinator only.

    The names of the files name no rank: the coordinator numbers them.
    """

    def __init__(self, folder: Path, save_id: str, *, file_bytes: int | None = None):
        self._folder, self._save_id, self._file_bytes = folder, save_id, file_bytes or FILE_BYTES
        self.files: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder exists already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        shares = [self._divide(plan.items) for plan in plans]
        prepared, count = [], 0
        for plan, groups in zip(plans, shares, strict=True):
            names = [f"tensors-{count + i:05d}.safetensors" for i in range(len(groups))]
            prepared.append(replace(plan, storage_data=dict(zip(names, groups, strict=True))))
            count += len(groups)
        return prepared

    def _divide(self, items: list[WriteItem]) -> list[list[int]]:
        """Places in `items` of the tensors of each file, in order; empty pieces (of ranks that hold no row) have none."""
        tensors = [i for i, item in enumerate(items) if item.type != WriteItemType.BYTE_IO and _entry(item).elements]
        return split_into_files(tensors, self._file_bytes, lambda i: _entry(items[i]))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                content = planner.resolve_data(item)
                assert isinstance(content, io.BytesIO)
                results.append(WriteResult(item.index, 0, json.loads(content.getvalue())))
        for written in in_threads(lambda name: self._write(name, plan, planner), plan.storage_data, THREADS):
            results += written
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, name: str, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        items = [plan.items[i] for i in plan.storage_data[name]]
        entries = [_entry(item) for item in items]
        with TensorFile(self._folder / name, entries, {"format": "pt", "save_id": self._save_id}) as file:
            for item, entry in zip(items, entries, strict=True):
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor) and tensor.shape == entry.shape and tensor.dtype == entry.dtype
                file.append(tensor.cpu())
        return [
            WriteResult(item.index, _entry(item).nbytes, _Written(_piece(item, name), file.record)) for item in items
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        index = Index(self._save_id, {}, {})
        for name, found in metadata.state_dict_metadata.items():
            if isinstance(found, TensorStorageMetadata):
                index.tensors[name] = TensorRecord(DTYPE_NAMES[found.properties.dtype], list(found.size))
        for result in (result for rank in results for result in rank):
            if isinstance(result.storage_data, _Written):
                written = result.storage_data
                index.tensors[result.index.fqn].pieces.append(written.piece)
                self.files[written.piece.file] = written.record
            else:
                index.values[result.index.fqn] = result.storage_data
        self.files[indexes.NAME] = indexes.write(self._folder, index)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False  # never chosen by torch


class ValuePlanner(DefaultLoadPlanner):
    """Loads into a flat state dict: tensors in place, other values as JSON has them (a list becomes a tuple again)."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # torch's own gives tensors on the meta device memory, of which there are none here, and drops what it does not know.
        super().set_up_planner({}, metadata, is_coordinator)
        self.state_dict = self.original_state_dict = state_dict

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.part(index, found.local) if isinstance(found, DividedTensor) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = json.loads(value.getvalue())
        self.state_dict[name] = tuple(loaded) if isinstance(self.state_dict[name], tuple) else loaded


class ShardReader(StorageReader):
    """Reads the files of ShardWriter by their index, which has been checked."""

    def __init__(self, folder: Path, index: Index):
        self._folder, self._index = folder, index
        self._pieces = {
            (name, tuple(piece.offsets)): piece for name, record in index.tensors.items() for piece in record.pieces
        }

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing: a reader is used once."""

    def read_metadata(self) -> Metadata:
        found: dict[str, Any] = {name: BytesStorageMetadata() for name in self._index.values}
        for name, record in self._index.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in record.pieces]
            properties = TensorProperties(DTYPES[record.dtype])
            found[name] = TensorStorageMetadata(properties, torch.Size(record.shape), chunks)
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do after the constructor."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, Piece]]] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(json.dumps(self._index.values[name]).encode()))
                continue
            assert item.storage_index.offset is not None
            piece = self._pieces[name, tuple(item.storage_index.offset)]
            by_file.setdefault(piece.file, []).append((item, piece))
        in_threads(lambda file: self._read(file, by_file[file], planner), by_file, THREADS)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: str, items: list[tuple[ReadItem, Piece]], planner: LoadPlanner) -> None:
        with ExitStack() as stack:
            source = stack.enter_context(TensorSource(self._folder / file))
            for item, piece in items:
                dtype = DTYPES[self._index.tensors[item.storage_index.fqn].dtype]
                source.check(piece.key, dtype, piece.sizes)
                tensor = planner.resolve_tensor(item).detach()
                assert tensor.shape == item.lengths, (item, tensor.shape)
                _copy_box(source, piece, dtype, item, tensor)
                planner.commit_tensor(item, tensor)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False


def _copy_box(source: TensorSource, piece: Piece, dtype: torch.dtype, item: ReadItem, target: Tensor) -> None:
    """Copy the box `item` of a piece to `target`, some rows at a time: bounded memory, and one read where rows are whole."""
    if not piece.sizes:
        value = torch.empty((), dtype=dtype)
        source.read_into(piece.key, 0, value)
        target.copy_(value)
        return
    row = torch.Size(piece.sizes[1:]).numel()
    rows_at_once = max(READ_BYTES // max(row * dtype.itemsize, 1), 1)
    for start in range(0, item.lengths[0], rows_at_once):
        count = min(rows_at_once, item.lengths[0] - start)
        rows = torch.empty((count, *piece.sizes[1:]), dtype=dtype)
        source.read_into(piece.key, (item.storage_offsets[0] + start) * row, rows)
        for dim in range(1, rows.ndim):
            rows = rows.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        target.narrow(0, start, count).copy_(rows)


def _entry(item: WriteItem) -> Entry:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    name = item.index.fqn
    if chunk.sizes != item.tensor_data.size:
        name += "@" + ",".join(map(str, chunk.offsets))
    return Entry(name, item.tensor_data.properties.dtype, tuple(chunk.sizes))


def _piece(item: WriteItem, file: str) -> Piece:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Piece(list(chunk.offsets), list(chunk.sizes), file, _entry(item).name)
