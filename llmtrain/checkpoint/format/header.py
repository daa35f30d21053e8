"""The header of a safetensors file: a length and JSON. No torch here.

The format (https://github.com/huggingface/safetensors#format): the length of the header as a little-endian u64, the
header as JSON, and the tensors' bytes without gaps. Nothing in it is executed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.regular_file import open_regular, parse_json
from llmtrain.errors import UserError

_MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library: a damaged length must not become an allocation."""


class HeaderError(UserError):
    """A file does not begin as a safetensors file does."""


@dataclass(frozen=True)
class Header:
    """metadata: of the file. tensors: name -> {dtype, shape, data_offsets}. data: offset of the tensors' bytes in the file."""

    metadata: dict[str, str]
    tensors: dict[str, dict[str, Any]]
    data: int


def read_header(path: Path) -> Header:
    """Read the header. Raises HeaderError for a file that is no safetensors file, OSError if it cannot be read."""
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise HeaderError("it does not begin as a safetensors file")
        text = file.read(length)
    try:
        tensors = parse_json(text)
        metadata = tensors.pop("__metadata__", {})
    except (ValueError, AttributeError, TypeError) as error:
        raise HeaderError(f"its header is not JSON: {error}") from None
    if not isinstance(metadata, dict) or not all(isinstance(entry, dict) for entry in tensors.values()):
        raise HeaderError("its header is not that of a safetensors file")
    return Header(metadata, tensors, 8 + length)
