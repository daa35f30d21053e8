"""Answers on disk: what was asked once is not asked again. No torch here.

A file per set of requests and model, named by both, with a line per document that is appended when it is answered. A
line that a kill cut short is not JSON and is passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.eval.scoring.request import Generate, Generated, Score, Scored

FORMAT = 1

Answers = dict[int, list[Scored | Generated]]
"""By document, in the order of its requests."""


def requests_digest(requests: Sequence[Score | Generate]) -> str:
    """Of all that is asked, token by token: data, task, convention, examples and tokenizer are in it."""
    digest = hashlib.sha256()
    for request in requests:
        ends = request.continuation if isinstance(request, Score) else ()
        digest.update(array("q", [request.document, len(request.context), len(ends)]).tobytes())
        digest.update(array("q", (*request.context, *ends)).tobytes())
        if isinstance(request, Generate):
            digest.update(json.dumps([request.stops, request.max_new_tokens]).encode())
    return digest.hexdigest()


class Store:
    """about: model, window, dtype, requests: all that answers depend on."""

    def __init__(self, folder: Path, about: Mapping[str, Any]):
        self.about = {"format": FORMAT, **about}
        key = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"{key[:32]}.jsonl"

    def read(self) -> Answers:
        """What is there; nothing, if the file is another's."""
        if not self.path.is_file():
            return {}
        found: Answers = {}
        for number, line in enumerate(self.path.read_text(encoding="utf-8", errors="replace").splitlines()):
            try:
                content = json.loads(line)
            except json.JSONDecodeError:
                continue
            if number == 0 and content != self.about:
                return {}
            if "document" in content:
                found[content["document"]] = [_answer(fields) for fields in content["answers"]]
        return found

    def append(self, answers: Mapping[int, Sequence[Scored | Generated]]) -> None:
        """Durable when it returns."""
        lines: list[Any] = [
            {"document": document, "answers": [_fields(one) for one in some]} for document, some in answers.items()
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            if file.tell() == 0:
                lines.insert(0, self.about)
            else:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a kill cut the last line short
                    file.write(b"\n")
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())


def _fields(answer: Scored | Generated) -> list[Any]:
    if isinstance(answer, Generated):
        return [answer.text, answer.truncated]
    return [answer.log_likelihood, answer.greedy, answer.tokens, answer.truncated]


def _answer(fields: list[Any]) -> Scored | Generated:
    return Generated(*fields) if isinstance(fields[0], str) else Scored(*fields)
