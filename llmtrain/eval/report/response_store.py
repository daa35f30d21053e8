"""Responses on disk, which an interrupted or repeated evaluation reuses. Imports no torch.

One file per model and set of requests, named by a digest of both, with one line per document that is appended when it is
answered, with its checksum. A line that was cut short by a kill, or is damaged, is left out.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.config.checksums import encode_record, read_records
from llmtrain.config.output_folder import named
from llmtrain.eval.prompts.requests import (
    GeneratedText,
    GenerateUntilRequest,
    Loglikelihood,
    LoglikelihoodRequest,
    Request,
    Response,
    Responses,
)
from llmtrain.logs import log

FORMAT = 1


def requests_digest(requests: Sequence[Request]) -> str:
    """Digest of all requests' tokens and limits: it depends on data, task, convention, examples and tokenizer."""
    digest = hashlib.sha256()
    for request in requests:
        continuation = request.continuation if isinstance(request, LoglikelihoodRequest) else ()
        digest.update(array("q", [request.document, len(request.context), len(continuation)]).tobytes())
        digest.update(array("q", (*request.context, *continuation)).tobytes())
        if isinstance(request, GenerateUntilRequest):
            digest.update(json.dumps([request.stops, request.max_new_tokens]).encode())
            if request.sampling is not None:
                digest.update(repr(request.sampling).encode())
    return digest.hexdigest()


class ResponseStore:
    """File of stored responses. about: all that they depend on (model, window, dtype, tokenizer, requests)."""

    def __init__(self, folder: Path, about: Mapping[str, Any]):
        self.about = {"format": FORMAT, **about}
        key = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"{key[:32]}.jsonl"

    def read(self) -> Responses:
        """Stored responses; empty if there is no file or its first line differs from `about`. Damaged lines are named, and their
        documents left out."""
        if not self.path.is_file():
            return {}
        stored, found = read_records(self.path), {}
        damaged = dict(stored.damaged)
        for number, content in enumerate(stored.records):
            if "document" not in content:
                if number == 0 and content != self.about:
                    return {}
                continue
            try:
                document, answers = content["document"], [_response(fields) for fields in content["answers"]]
                assert isinstance(document, int)
            except (KeyError, IndexError, TypeError, AssertionError):
                damaged[number + 1] = "holds no responses"
                continue
            found[document] = answers
        if damaged:
            lines = ", ".join(map(str, sorted(damaged)[:10])) + (", ..." if len(damaged) > 10 else "")
            first = damaged[min(damaged)]
            log.warning(f"WARNING: {self.path}: line {lines} {first}; the documents of damaged lines are asked again")
        return found

    def append(self, responses: Mapping[int, Sequence[Response]]) -> None:
        """Append responses and sync the file to disk."""
        lines: list[Mapping[str, Any]] = [
            {"document": document, "answers": [_fields(one) for one in some]} for document, some in responses.items()
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with named(self.path), self.path.open("ab+") as file:
            if file.tell() == 0:
                lines.insert(0, self.about)
            else:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a kill cut the last line short
                    file.write(b"\n")
            file.write(b"".join(map(encode_record, lines)))
            file.flush()
            os.fsync(file.fileno())


def _fields(response: Response) -> list[Any]:
    if isinstance(response, GeneratedText):
        return [response.text, response.truncated]
    return [response.log_likelihood, response.greedy, response.tokens, response.truncated]


def _response(fields: list[Any]) -> Response:
    """Raises TypeError or IndexError for what is none."""
    response = GeneratedText(*fields) if isinstance(fields[0], str) else Loglikelihood(*fields)
    if not isinstance(response, GeneratedText) and not isinstance(response.log_likelihood, int | float):
        raise TypeError(fields)
    return response
