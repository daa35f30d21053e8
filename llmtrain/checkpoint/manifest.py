"""The manifest: written last, it is what makes a folder of shards a checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
NAME = "manifest.json"
_FOLDER = re.compile(r"step-(\d{8})")


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says which, why, and what to do."""


class NewerFormatError(CheckpointError):
    """A checkpoint of a later llmtrain: whole, but not to be read here, nor to be passed over for an older one."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is, beyond its tensors. Plain JSON: nothing in it names a device, a rank count or a kernel.

    clock: Composer's timestamp (steps, samples, tokens, epochs).
    data: StreamingDataset's position, and `fingerprint` of the shards.
    files: size in bytes of every file beside the manifest.
    """

    step: int
    tokens: int
    config: dict[str, Any]
    clock: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, int]
    format: int = FORMAT


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def write(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest so that it is either whole or absent, also after a power cut."""
    temporary = folder / (NAME + ".tmp")
    with temporary.open("w") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / NAME)
    sync_folder(folder)


def read(folder: Path) -> Manifest:
    """Reads and checks a checkpoint's manifest. Raises CheckpointError if the checkpoint is not whole."""
    try:
        fields = json.loads((folder / NAME).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {NAME}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / NAME} cannot be read: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("format"), int):
        raise CheckpointError(f"{folder / NAME} is not a checkpoint's manifest")
    if fields["format"] > FORMAT:
        raise NewerFormatError(
            f"{folder} was written in format {fields['format']}; this llmtrain reads up to {FORMAT}. Update llmtrain"
        )
    try:
        manifest = Manifest(**fields)
    except TypeError as error:  # a key is missing, or one too many
        raise CheckpointError(f"{folder / NAME} is not a checkpoint's manifest: {error}") from None
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is incomplete: {name} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{folder} is damaged: {name} has {path.stat().st_size} bytes, not {size}")
    return manifest


def folders(root: Path) -> list[Path]:
    """Checkpoint folders under `root`, oldest first, whole or not. Half-written ones have another name."""
    found = [path for path in root.glob("step-*") if _FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: path.name)


def latest(root: Path, warn: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """The newest complete checkpoint under `root`; every newer one that is not whole is named through `warn`.

    Raises NewerFormatError rather than go back behind a checkpoint of a later llmtrain.
    """
    for folder in reversed(folders(root)):
        try:
            return folder, read(folder)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            warn(f"{error}; trying the one before")
    return None


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
