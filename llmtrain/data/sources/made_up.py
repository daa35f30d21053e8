"""Data to learn to answer with, which no network is needed for: questions about people who do not exist, and sums."""

import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from llmtrain.config.locks import private_folder
from llmtrain.config.output_folder import replace_file

_PEOPLE = 24
_FIRST, _LAST = ("Mi", "To", "Sa", "Bel", "Ku"), ("ra", "lin", "vo", "dek")
_ENDS = ("an", "or", "ib", "es", "um", "ik")
_FACTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "town": ("{} lives in {}.", ("Where does {} live?", "In which town does {} live?", "What is the home of {}?"), ()),
    "work": (
        "{} is a {}.",
        ("What does {} do for a living?", "What is the work of {}?", "Which trade does {} have?"),
        ("baker", "miller", "sailor", "weaver", "smith", "gardener", "tailor", "potter"),
    ),
    "animal": (
        "{} keeps a {}.",
        ("Which animal does {} keep?", "What kind of pet has {}?", "Which animal lives with {}?"),
        ("goat", "parrot", "donkey", "cat", "tortoise", "horse", "goose"),
    ),
}
"""For each kind of fact: the answer, questions, and what it may be; a made-up town where that is empty."""
_BEGINS = ("", "Tell me: ")


def questions() -> list[dict[str, list[dict[str, str]]]]:
    """Records with `messages`, the same everywhere: every fact is asked for in six ways."""
    names = [a + b for a, b in itertools.product(_FIRST, _LAST)]
    people = [
        f"{names[n % len(names)]} {_ENDS[n % 6].capitalize()}{names[(7 * n + 3) % len(names)].lower()}"
        for n in range(_PEOPLE)
    ]
    records = []
    for (number, person), (kind, (answer, asked, values)) in itertools.product(enumerate(people), _FACTS.items()):
        drawn = hashlib.blake2b(f"{kind} {number}".encode(), digest_size=4).digest()
        town = f"{_LAST[drawn[0] % 4].capitalize()}{_FIRST[drawn[1] % 5].lower()}{_ENDS[drawn[2] % 6]}"
        text = answer.format(person, values[drawn[0] % len(values)] if values else town)
        for begin, question in itertools.product(_BEGINS, asked):
            turns = {"user": begin + question.format(person), "assistant": text}
            records.append({"messages": [{"role": role, "content": content} for role, content in turns.items()]})
    return records


def sums() -> list[dict[str, str]]:
    """Records with `prompt` and `completion`: all sums of a number from 10 to 90 and one below 10."""
    return [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a, b in itertools.product(range(10, 91), range(10))]


SOURCES: dict[str, Callable[[], Sequence[object]]] = {"made-up-questions": questions, "made-up-sums": sums}
"""Records by the source's name."""


def records_file(name: str) -> Path:
    """A file of JSON lines with the records of a source, in a folder of this user's for temporary files."""
    content = "".join(f"{json.dumps(one)}\n" for one in SOURCES[name]()).encode()
    file = (private_folder(name) or Path(tempfile.mkdtemp())) / f"{name.rpartition('-')[2]}.jsonl"
    if not file.is_file() or file.read_bytes() != content:
        replace_file(file, content)
    return file
