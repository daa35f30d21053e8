"""Scores and answers of each document, which results keep: lines of documents/MODEL/TASK-N-shot.jsonl.gz. Imports no torch.

A line has the document's place, a digest of its texts, the end of what was asked, the right answer, the responses, and
`values`: its contribution to each metric, as a number, or as [sum, weight] where its weight is not 1.
"""

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.config.checksums import DamagedError, checksum
from llmtrain.config.regular_file import parse_json, read_bytes
from llmtrain.eval.errors import EvalError
from llmtrain.eval.report.metrics import DocumentMetrics, WeightedSum

Line = dict[str, Any]
Texts = Mapping[str, str | Sequence[str]]

_PROMPT, _CHOICE = 200, 100
"""Characters kept of a prompt and of each choice."""

ANSWER_COLUMNS = ("task", "shots", "document", "prompt", "right", "answer", "metric", "value")
ANSWERS_PER_TASK, MOST_ANSWERS = 100, 2000


def describe(texts: Texts, instruction: str = "") -> Line:
    """The digest of a document's texts, and excerpts of them. instruction: text in front of the document that it depends on.

    texts: `prompt`, `right` (the right answer) and what else belongs to the document, such as `choices`. Two documents are the
    same if their digests are.
    """
    whole = json.dumps([instruction, {name: texts[name] for name in sorted(texts)}], default=str)
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    shown = {
        name: excerpt(text, _PROMPT, end=name == "prompt")
        if isinstance(text, str)
        else [excerpt(str(one), _CHOICE) for one in text]
        for name, text in texts.items()
    }
    return {"digest": digest, **shown}


def excerpt(text: str, most: int, end: bool = False) -> str:
    """The first characters of a text, or the last."""
    if len(text) <= most:
        return text
    return "…" + text[-most:] if end else text[:most] + "…"


def encode_lines(documents: Sequence[DocumentMetrics]) -> bytes:
    """The content of a file: compressed lines, the same for the same documents."""
    lines = ({**one.details, "values": {name: _plain(item) for name, item in one.values.items()}} for one in documents)
    text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
    return gzip.compress(text.encode(errors="surrogatepass"), mtime=0)


def read_lines(path: Path, expected: str | None = None) -> list[Line]:
    """Lines of a file. expected: its checksum, if that is known. Raises EvalError for one that is missing or damaged."""
    try:
        content = read_bytes(path)
        if expected is not None and checksum(content) != expected:
            raise DamagedError("it is not what was written: its checksum differs")
        text = gzip.decompress(content).decode(errors="surrogatepass")
        return [parse_json(line) for line in text.split("\n") if line]
    except FileNotFoundError:
        raise EvalError(f"{path}: no such file; run the same `llmtrain eval` again, which asks nothing anew") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise EvalError(f"{path} cannot be read ({error}); run the same `llmtrain eval` again") from None


def _plain(item: WeightedSum) -> float | list[float]:
    total, weight = item
    return total if weight == 1 else [total, weight]


def contribution(line: Line, metric: str) -> WeightedSum:
    """A document's (sum, weight) in a metric."""
    value = line["values"][metric]
    return (float(value[0]), float(value[1])) if isinstance(value, list) else (float(value), 1.0)


def given_answer(line: Line, metric: str) -> str:
    """The answer of the model, for people: the chosen choice, the generated text, or the log-likelihood."""
    if "text" in line:
        return str(line["text"])
    likelihoods, choices = line.get("log_likelihoods", ()), line.get("choices", ())
    if choices:
        chosen = line.get("chosen", {}).get(metric.partition(",")[0].removeprefix("acc_"))
        if chosen is None:  # no accuracy: the answer is that of the highest log-likelihood
            chosen = max(range(min(len(likelihoods), len(choices))), key=likelihoods.__getitem__, default=None)
        return "" if chosen is None or chosen >= len(choices) else choices[chosen]
    return f"log-likelihood {sum(likelihoods):.2f}" if likelihoods else ""


def answer_rows(task: str, shots: int, metric: str, documents: Sequence[DocumentMetrics]) -> Iterator[list[Any]]:
    """Rows of ANSWER_COLUMNS for the first documents of a task."""
    for one in documents[:ANSWERS_PER_TASK]:
        line = {**one.details, "values": one.values}
        total, weight = one.values.get(metric, (math.nan, 1.0))
        texts = (line.get("prompt", ""), line.get("right", ""), excerpt(given_answer(line, metric), 500))
        yield [task, shots, line.get("where", ""), *texts, metric, total / weight]
