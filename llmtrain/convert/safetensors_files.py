"""Division of a model's tensors into safetensors files. A file is written by checkpoint/tensor_file.py."""

from __future__ import annotations

from collections.abc import Iterable

from llmtrain.checkpoint.format.tensor_file import Entry


def split_into_files(entries: Iterable[Entry], max_bytes: int) -> list[list[Entry]]:
    """Divide tensors, in order, into files of at most max_bytes; a larger tensor has a file of its own."""
    files: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not files or size + entry.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return files


def safetensors_names(count: int) -> list[str]:
    """Names of `count` files, as transformers writes them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
