"""How the tensors of a published model are spread over safetensors files. How a file is written: checkpoint/tensor_file.py."""

from __future__ import annotations

from collections.abc import Iterable

from llmtrain.checkpoint.tensor_file import Entry


def split_into_files(entries: Iterable[Entry], max_bytes: int) -> list[list[Entry]]:
    """Files of at most max_bytes of tensors each, in order; a tensor that is larger has a file of its own."""
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
    """As transformers names them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
