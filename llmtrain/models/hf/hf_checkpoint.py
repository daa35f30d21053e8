"""A checkpoint in Hugging Face format: config.json, and tensors that are read one at a time."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmtrain.config.regular_file import read_json, require_regular
from llmtrain.errors import UserError
from llmtrain.models.hf.foreign_files import reason

_SAFETENSORS = "model.safetensors"
_PICKLE = "pytorch_model.bin"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors."""


class HFCheckpoint(Mapping[str, Tensor]):
    """The tensors of a folder by name, each read from its file when asked for, in the dtype it is stored in.

    config: the content of config.json. Opened by open_hf_checkpoint.
    """

    def __init__(self, folder: Path, config: dict[str, Any], shards: Mapping[Path, _Safetensors | _Pickle]):
        self.folder, self.config = folder, config
        self._shards = shards
        self._file_of: dict[str, Path] = {}
        for file, shard in shards.items():
            for name in shard.names():
                if name in self._file_of:
                    raise UserError(f"tensor {name} is in two files: {self._file_of[name]} and {file}")
                self._file_of[name] = file

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shards[self._file_of[name]].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor. Raises UserError for one that torch does not have."""
        return self._shards[self._file_of[name]].dtype(name)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, on the CPU. Raises KeyError for an unknown name, ValueError for a damaged file."""
        return self._shards[self._file_of[name]].read(name)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def open_hf_checkpoint(folder: str | os.PathLike[str]) -> HFCheckpoint:
    """Open config.json and the headers of model*.safetensors, or of pytorch_model*.bin where there are none.

    Raises UserError that names the file that is missing or damaged, or the tensor that a shard should hold.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    config = _read_json(folder / "config.json")
    for name, kind in ((_SAFETENSORS, _Safetensors), (_PICKLE, _Pickle)):
        index, single = folder / f"{name}.index.json", folder / name
        if os.path.lexists(index):
            return HFCheckpoint(folder, config, _open_indexed(index, kind))
        if os.path.lexists(single):
            return HFCheckpoint(folder, config, {single: kind(single)})
    adapter = "; it holds a PEFT adapter, to be merged into its model first (merge_and_unload)"
    raise UserError(
        f"{folder} holds no weights: no {_SAFETENSORS}, no {_PICKLE}, and no index of either"
        + (adapter if (folder / "adapter_config.json").is_file() else "")
    )


def _open_indexed(index: Path, kind: type[_Safetensors] | type[_Pickle]) -> Mapping[Path, _Safetensors | _Pickle]:
    promised = _read_json(index).get("weight_map")
    if not isinstance(promised, dict):
        raise UserError(f"{index} has no weight_map")
    for name in promised.values():
        if not isinstance(name, str) or Path(name).name != name or name == "..":
            raise UserError(f"{index} names {name!r}, which is no file in its folder")
    files = {name: index.parent / name for name in dict.fromkeys(promised.values())}
    absent = [name for name, file in files.items() if not file.is_file()]
    if absent:
        raise UserError(f"{index} names {len(absent)} shards that are missing: {', '.join(absent[:5])}")
    shards = {file: kind(file) for file in files.values()}
    held = {file: set(shard.names()) for file, shard in shards.items()}
    for tensor, name in promised.items():
        if tensor not in held[files[name]]:
            raise UserError(f"{files[name]} does not hold tensor {tensor}, which {index.name} says it does")
    return shards


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"{file.parent} holds no {file.name}")
    try:
        content = read_json(file)
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object")
    return content


class _Safetensors:
    def __init__(self, file: Path):
        self.file = file
        try:
            require_regular(file)
            self._open = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged or no safetensors file: {error}") from error

    def names(self) -> list[str]:
        return list(self._open.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        found = self._open.get_slice(name).get_dtype()
        if found not in DTYPES:
            raise UserError(f"{self.file}: tensor {name} is stored as {found}, which cannot be read here")
        return DTYPES[found]

    def read(self, name: str) -> Tensor:
        return self._open.get_tensor(name)


class _Pickle:
    """torch.save's format, restricted to tensors; mapped rather than read into memory, except in its oldest form."""

    def __init__(self, file: Path):
        self.file = file
        try:
            require_regular(file)
            # Files from before torch 1.6 are no zip archives and cannot be mapped.
            mapped = zipfile.is_zipfile(file)
            content = torch.load(str(file), map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as error:  # unpickling raises what it likes
            raise UserError(f"{file} is damaged or no file of tensors: {reason(error)}") from error
        if not isinstance(content, Mapping):
            raise UserError(f"{file} holds a {type(content).__name__}, not tensors by name")
        self._tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def find_hf_folder(name: str | os.PathLike[str]) -> Path:
    """Find a folder with config.json and weights: a local one, or a download from the Hugging Face hub.

    Raises UserError with the reason, and for the hub what to do without it.
    """
    text = os.fspath(name)
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise UserError(f"{text} is a file; name the folder that holds config.json and the weights")
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise UserError(f"there is no checkpoint at {text}: no such folder")
    return _download(text)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    def fetch(*weights: str) -> Path:
        templates = ["chat_template.jinja", "additional_chat_templates/*.jinja"]
        tokenizer = ["token*", "special_tokens_map.json", "vocab*", "merges*", *templates]
        others = ["config.json", "generation_config.json", *tokenizer]
        return Path(snapshot_download(name, allow_patterns=[*others, *weights]))

    try:
        # Two calls: pickled weights are downloaded only from a repository without safetensors.
        folder = fetch("model*.safetensors", f"{_SAFETENSORS}.index.json")
        if not any(folder.glob("model*.safetensors")):
            folder = fetch("pytorch_model*.bin", f"{_PICKLE}.index.json")
    except HFValidationError as error:
        raise UserError(f"'{name}' is neither a folder nor a name on the Hugging Face hub") from error
    except Exception as error:  # of the hub's client, and of the HTTP library that it uses
        raise UserError(
            f"'{name}' is not a local folder, and the Hugging Face hub did not give it ({type(error).__name__}). Check "
            f"the name; for a gated model run `hf auth login`; without internet, run `hf download {name} --local-dir DIR` "
            "elsewhere and name a copy of DIR."
        ) from error
    return folder
