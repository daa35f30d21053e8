"""`llmtrain checkpoint convert`: any readable checkpoint to the current format, or to Hugging Face's."""

import argparse
import math
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import Manifest, OldFormatError
from llmtrain.checkpoint.format.tensor_file import Entry
from llmtrain.checkpoint.repository import Repository
from llmtrain.checkpoint.save_load import MACHINE_SETTINGS
from llmtrain.config.addresses import is_remote
from llmtrain.config.output_folder import atomic_folder, refuse_existing, require_space
from llmtrain.convert.checkpoint_tensors import CheckpointTensors
from llmtrain.convert.composer import is_composer_checkpoint, open_composer_checkpoint
from llmtrain.convert.dcp import DcpTensors
from llmtrain.convert.export import SMALL_FILES, export, piece_counts
from llmtrain.convert.lazy_checkpoint import write_tensors
from llmtrain.convert.tensor_reader import TensorReader
from llmtrain.data.tokenize import stored_tokenizer
from llmtrain.errors import UserError
from llmtrain.progress import ByteBar, format_bytes
from llmtrain.versions import versions

_FP32 = torch.float32


@dataclass(frozen=True)
class CheckpointContent:
    """A checkpoint to write. parts: for each tensor, by full name, its entry and the tensors of `source` that it is the flat
    concatenation of. about: fields of the manifest. extras: folders and files to copy."""

    place: str
    source: TensorReader
    parts: dict[str, tuple[Entry, list[str]]]
    values: Mapping[str, Any]
    about: dict[str, Any]
    extras: list[Path]


def convert(source: str, out: Path, args: argparse.Namespace, *, progress: bool) -> str:
    """Write `out`, which appears complete; return a sentence about it. args: those of `llmtrain checkpoint convert`.

    Raises UserError for an existing `out`, an unreadable or damaged source, or a model that does not fit.
    """
    refuse_existing(out)
    path = Path(source).expanduser()
    foreign = not is_remote(source) and is_composer_checkpoint(path)
    if not is_remote(source) and not path.exists():
        raise UserError(f"{path} does not exist" + (", or is a link that leads nowhere" if path.is_symlink() else ""))
    if args.config and not foreign:
        raise UserError("--config has no effect: the checkpoint has its own config")
    if args.to == "llmtrain":

        def convert(content: CheckpointContent) -> tuple[CheckpointContent, int, int]:
            return content, *write(content, out, shards=args.shards, progress=progress)

        if foreign or _is_format_1(source):
            content, nbytes, files = convert(_open_composer(path, args.config) if foreign else _open_ours(source))
        else:
            content, nbytes, files = Repository(source).read(lambda folder, _: convert(_open_ours(str(folder))))
        what = "with its optimizer: a run can go on from it" if content.values else "weights alone: for init_from"
        return f"{content.place} -> {out}: format {manifests.FORMAT}, {format_bytes(nbytes)} in {files} file(s), {what}"
    if foreign or _is_format_1(source):
        content = _open_composer(path, args.config) if foreign else _open_ours(source)
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f"{out.name}.") as scratch:
            write(content, Path(scratch) / "checkpoint", shards=None, progress=progress)
            return _to_hf(str(Path(scratch) / "checkpoint"), out, args, progress).replace(scratch, source)
    return _to_hf(source, out, args, progress)


def write(content: CheckpointContent, out: Path, *, shards: int | None, progress: bool) -> tuple[int, int]:
    """Write a checkpoint in the current format, a few megabytes in memory at a time. Returns its bytes and number of files.

    shards: approximate number of files, as a tensor is never split. Default: files of the size that a save writes.
    """
    entries = [entry for entry, _ in content.parts.values()]
    total = sum(entry.nbytes for entry in entries)
    require_space(out, total + SMALL_FILES)
    size = None if shards is None else max(-(-total // shards), 1)
    save_id = str(uuid.uuid4())

    def pieces(entry: Entry) -> Iterator[Tensor]:
        for name in content.parts[entry.name][1]:
            for piece in content.source.elements(name, piece_counts(math.prod(content.source.shape(name) or ()))):
                yield piece.to(entry.dtype)

    with ByteBar(progress, total, title="convert") as bar, atomic_folder(out) as partial:
        files = write_tensors(partial, entries, pieces, bar.advance, save_id, content.values, size)
        for extra in content.extras:
            copy = shutil.copytree if extra.is_dir() else shutil.copyfile
            copy(extra, partial / extra.name)
            if extra.name == stored_tokenizer.NAME:
                files[extra.name] = {
                    "bytes": extra.stat().st_size,
                    "xxh3_128": manifests.hash_file(partial / extra.name),
                }
        manifests.write(partial, Manifest(save_id=save_id, files=files, **content.about))
    return sum(record["bytes"] for record in files.values()), sum(name.endswith(".safetensors") for name in files)


def _to_hf(source: str, out: Path, args: argparse.Namespace, progress: bool) -> str:
    size = 5 * 10**9
    if args.shards is not None:
        folder, manifest = Repository(source).open()
        tensors = CheckpointTensors(folder, manifest)
        elements = sum(math.prod(tensors.shape(name) or ()) for name in tensors.names("model."))
        width = 4 if args.dtype in ("auto", "float32") else 2
        size = max(-(-elements * width // args.shards), 1)
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    made = export(source, out, dtype=dtype, max_shard_bytes=size, tokenizer=args.tokenizer, progress=progress)
    return f"{made.checkpoint} -> {made.out}: {made.architecture}, {format_bytes(made.nbytes)} in {made.files} file(s)"


def _open_ours(source: str) -> CheckpointContent:
    """Open a checkpoint of llmtrain in any format, with all its content. Every byte is verified first (format 1 had no hashes)."""
    tensors: CheckpointTensors | DcpTensors
    if _is_format_1(source):
        folder = _format_1_folder(source)
        manifest = manifests.read_format_1(folder)
        tensors = DcpTensors(folder)
        values = {name: value for name, value in tensors.values("").items() if not name.endswith(MACHINE_SETTINGS)}
    else:
        folder, manifest = Repository(source).open()
        manifests.verify(folder, manifest)
        tensors = CheckpointTensors(folder, manifest)
        if manifest.base is not None:
            tensors.verify(tensors.names("model."))
        values = tensors.values
    entries = {name: Entry(name, tensors.dtype(name), tensors.shape(name) or ()) for name in tensors.names("")}
    about = {name: getattr(manifest, name) for name in ("step", "tokens", "config", "clock", "data", "versions")}
    extras = [folder / name for name in ("tokenizer", "model.yaml", stored_tokenizer.NAME) if (folder / name).exists()]
    return CheckpointContent(str(folder), tensors, {n: (e, [n]) for n, e in entries.items()}, values, about, extras)


def _open_composer(path: Path, config_file: str | None) -> CheckpointContent:
    tensors, config, weights = open_composer_checkpoint(path, config_file)
    parts = {}
    for weight in weights:
        name = f"model.{weight.ours}"
        parts[name] = Entry(name, _FP32, weight.shape), [part.name for part in weight.parts]
    about = {
        "step": 0,
        "tokens": 0,
        "config": {"model": config.model_dump(mode="json"), "data": {"prepare": None, "train": None}},
        "clock": {},
        "data": {},
        "versions": versions("torch"),
    }
    return CheckpointContent(str(path), tensors, parts, {}, about, [])


def _is_format_1(source: str) -> bool:
    if is_remote(source):
        return False
    try:
        Repository(source).find()
    except OldFormatError:
        return True
    return False


def _format_1_folder(source: str) -> Path:
    newest_first = reversed(Repository(source).checkpoints())
    return next(found.fetch() for found in newest_first if isinstance(found.problem, OldFormatError))
