"""The manifest: written last, it makes a folder of tensor files a checkpoint. No torch here.

Damage is found by xxh3_128 (https://xxhash.com) of every file, and of the manifest itself: it runs at the speed of
memory, where sha256 would take longer than the disk. It is for integrity: no defence against someone who writes
checkpoints with intent, and none is needed, since nothing that is read from a checkpoint is executed.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from llmtrain.checkpoint.format.header import HeaderError, read_header
from llmtrain.checkpoint.format.threads import in_threads, one_at_a_time
from llmtrain.config.output_folder import sync_path, write_synced
from llmtrain.config.regular_file import open_regular, parse_json
from llmtrain.errors import UserError

FORMAT = 2
BASE_FORMAT = 3
"""Of checkpoints that hold a part of the model. What reads format 2 alone would take one for damaged, and go back to another."""
NAME = "manifest.json"
PUBLISHED = "published"
"""Key of the config of an imported checkpoint: the model_type of its folder."""
UNFINISHED = NAME + ".tmp"
"""The manifest until all is written; in a store, from before the first file is sent until the last one is there."""
OWN_FILE = re.compile(
    r"(manifest|index)\.json(\.tmp)?|tensors[\d-]*\.safetensors|__\d+_\d+\.distcp|\.metadata|model\.yaml|tokenizer.*"
)
"""Names in a checkpoint's folder, those of the first format among them."""
_CHECKSUM = re.compile(rb',\n "xxh3_128": "([0-9a-f]{32})"\n\}\n')
_STEP_NAME = re.compile(r"(?:.*/)?step-(\d{8})(?:\..*)?/?")
_MAX_BYTES = 64 * 2**20
_READ_BYTES = 8 * 2**20
_READERS = 4


class CheckpointError(UserError):
    """A checkpoint cannot be used; the message says which, why, and what to do."""


class FormatError(CheckpointError):
    """A checkpoint in another format: not to be read here, nor to be passed over for an older one."""


class NewerFormatError(FormatError):
    """A checkpoint of a later llmtrain."""


class OldFormatError(FormatError):
    """A checkpoint of an earlier llmtrain."""


class FileRecord(TypedDict):
    """Size and hash (hex) that a file of a checkpoint must have."""

    bytes: int
    xxh3_128: str


class Base(TypedDict):
    """The checkpoint that has what another one of the same model does not hold: its place, and its save_id."""

    address: str
    save_id: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint beyond its tensors. Plain JSON: nothing in it names a device, a rank count or a kernel.

    save_id: a UUID; every file of tensors bears it, so that two saves are never mixed.
    clock: Composer's timestamp (steps, samples, tokens, epochs).
    data: StreamingDataset's position, and `fingerprint` of the shards.
    files: every file beside the manifest that belongs to the checkpoint, by its plain name.
    base: the checkpoint beneath, where this one holds a part of the model's parameters.
    """

    save_id: str
    step: int
    tokens: int
    config: dict[str, Any]
    clock: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, FileRecord]
    format: int = FORMAT
    base: Base | None = None

    @property
    def nbytes(self) -> int:
        return sum(record["bytes"] for record in self.files.values())


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest so that it is either whole or absent, also after a power cut. Its last line is the hash of the rest."""
    fields = asdict(manifest)
    if manifest.base is None:
        del fields["base"]
    else:
        fields["format"] = BASE_FORMAT
    body = json.dumps(fields, indent=1).encode()
    checksum = xxhash.xxh3_128_hexdigest(body)
    temporary = folder / UNFINISHED
    write_synced(temporary, body.removesuffix(b"\n}") + f',\n "xxh3_128": "{checksum}"\n}}\n'.encode())
    temporary.rename(folder / NAME)
    sync_path(folder)


def read(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and check that all files are there, of the recorded size and of the same save.

    Raises CheckpointError if the checkpoint is not whole, FormatError if it is of another format.
    """
    manifest = parse(folder, _read_text(folder))
    for name in manifest.files:
        _check_file(folder, name, manifest)
    return manifest


def parse(folder: Path | str, text: bytes) -> Manifest:
    """Decode the manifest in `text`. folder: its place, for messages; the checkpoint's files are not examined.

    Raises CheckpointError if it is damaged, FormatError if it is of another format.
    """
    fields = _decode_fields(folder, text)
    if fields["format"] < FORMAT:
        raise OldFormatError(
            f"{folder} was written in format {fields['format']} by an earlier llmtrain; "
            f"`llmtrain checkpoint convert {folder} OUT` writes it in format {FORMAT}"
        )
    return _decode(folder, fields)


def read_format_1(folder: Path) -> Manifest:
    """Read a manifest of the first format, which had no save_id and no hashes (both are ""), for `llmtrain checkpoint convert`.

    Sizes are checked. Raises CheckpointError.
    """
    fields = _decode_fields(folder, _read_text(folder))
    if fields["format"] != 1:
        raise CheckpointError(f"{folder} is in format {fields['format']}, not 1")
    files = fields.get("files")
    if not isinstance(files, dict):
        raise _not_a_manifest(folder, "files")
    records = {name: {"bytes": size, "xxh3_128": ""} for name, size in files.items()}
    manifest = _decode(folder, fields | {"save_id": "", "files": records})
    for name, record in manifest.files.items():
        _check_size(folder, name, record["bytes"])
    return manifest


def verify(
    folder: Path,
    manifest: Manifest,
    progress: Callable[[int], None] = lambda size: None,
    names: Iterable[str] | None = None,
) -> None:
    """Read every byte of the checkpoint's files (or of `names` among them) and compare the hashes.

    progress: called with the bytes of each piece read, by one thread at a time. Raises CheckpointError that names the first
    file that is not as it was written.
    """
    advance = one_at_a_time(progress)

    def check(name: str) -> None:
        _check_file(folder, name, manifest)
        try:
            found = hash_file(folder / name, advance)
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read: {error}") from error
        if found != manifest.files[name]["xxh3_128"]:
            raise CheckpointError(f"{folder} is damaged: {name} is not what was written (its xxh3_128 differs)")

    in_threads(check, manifest.files if names is None else names, _READERS)


def hash_file(path: Path, progress: Callable[[int], None] = lambda size: None) -> str:
    """xxh3_128 of a file's content, in hex."""
    found = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    with open_regular(path) as file:
        while got := file.readinto(buffer):
            found.update(buffer[:got])
            progress(got)
    return found.hexdigest()


def _read_text(folder: Path) -> bytes:
    try:
        with open_regular(folder / NAME) as file:
            text = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {NAME}") from None
    except OSError as error:
        raise CheckpointError(f"{folder / NAME} cannot be read: {error.strerror or error}") from None
    if len(text) > _MAX_BYTES:
        raise CheckpointError(f"{folder / NAME} is not a checkpoint's manifest: it has more than {_MAX_BYTES:,} bytes")
    return text


def _decode_fields(folder: Path | str, text: bytes) -> dict[str, Any]:
    """The manifest's JSON, after a check of its format number and its own checksum."""
    try:
        fields = parse_json(text)
    except ValueError as error:  # not RecursionError: 1000 nested brackets do not come from damage
        raise CheckpointError(f"{folder}/{NAME} cannot be read: {error}") from None
    if not isinstance(fields, dict) or type(fields.get("format")) is not int:
        raise _not_a_manifest(folder, "it has no format")
    if fields["format"] > BASE_FORMAT:
        raise NewerFormatError(
            f"{folder} was written in format {fields['format']}; this llmtrain reads up to {BASE_FORMAT}. Update llmtrain"
        )
    if fields.pop("xxh3_128", None) is None:
        if fields["format"] < FORMAT:
            return fields  # the first format had none
        raise _not_a_manifest(folder, "it has no checksum")
    found = _CHECKSUM.search(text, max(len(text) - 80, 0))
    body = text[: found.start()] + b"\n}" if found else b""
    if found is None or found.end() != len(text) or found[1].decode() != xxhash.xxh3_128_hexdigest(body):
        raise CheckpointError(f"{folder} is damaged: {NAME} is not what was written (its xxh3_128 differs)")
    return fields


def _decode(folder: Path | str, fields: dict[str, Any]) -> Manifest:
    try:
        manifest = Manifest(**fields)
    except TypeError as error:  # a key is missing, or one too many
        raise _not_a_manifest(folder, error) from None
    kinds = {"save_id": str, "step": int, "tokens": int}
    kinds |= dict.fromkeys(("config", "clock", "data", "versions", "files"), dict)
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind):
            raise _not_a_manifest(folder, name)
    base = manifest.base
    if base is not None and not (
        isinstance(base, dict)
        and base.keys() == {"address", "save_id"}
        and all(isinstance(v, str) for v in base.values())
    ):
        raise _not_a_manifest(folder, "base")
    for name, record in manifest.files.items():
        # A name with a path in it would reach outside the folder.
        plain = name == Path(name).name and name not in ("", "..", NAME) and "\0" not in name
        if not plain or not isinstance(record, dict) or set(record) != {"bytes", "xxh3_128"}:
            raise _not_a_manifest(folder, f"files: {name}")
    if (named := _STEP_NAME.fullmatch(str(folder))) and int(named[1]) != manifest.step:
        raise CheckpointError(
            f"{folder} holds step {manifest.step}, which is not the step of its name; give it back its own"
        )
    return manifest


def _not_a_manifest(folder: Path | str, what: object) -> CheckpointError:
    return CheckpointError(f"{folder}/{NAME} is not a checkpoint's manifest: {what}")


def _check_file(folder: Path, name: str, manifest: Manifest) -> None:
    path = folder / name
    _require_file(folder, name)
    if path.suffix == ".safetensors":
        try:
            save_id = read_header(path).metadata.get("save_id")
        except (HeaderError, OSError) as error:
            _check_size(folder, name, manifest.files[name]["bytes"])
            raise CheckpointError(f"{folder} is damaged: {name}: {error}") from None
        if save_id != manifest.save_id:
            raise CheckpointError(
                f"{folder} holds mixed saves: {name} belongs to the save {save_id}, "
                f"the other files to {manifest.save_id}; put the original back"
            )
    _check_size(folder, name, manifest.files[name]["bytes"])


def _check_size(folder: Path, name: str, size: int) -> None:
    path = folder / name
    _require_file(folder, name)
    if path.stat().st_size != size:
        raise CheckpointError(f"{folder} is damaged: {name} has {path.stat().st_size} bytes, not {size}")


def _require_file(folder: Path, name: str) -> None:
    path = folder / name
    if not path.is_file():
        state = "is not a regular file" if os.path.lexists(path) else "is missing"
        raise CheckpointError(f"{folder} is incomplete: {name} {state}")
