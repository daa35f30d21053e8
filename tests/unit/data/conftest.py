"""Small corpora, made afresh for every test."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.schema.data import PrepareConfig

SENTENCE = "the quick brown fox jumps over lazy dogs while naïve café owners 走 home über the bridge\n"


def some_text(seed: int, words: int) -> str:
    rng, words_of_it = random.Random(seed), SENTENCE.split(" ")
    return " ".join(rng.choice(words_of_it) for _ in range(words))


@pytest.fixture(scope="session")
def make_text() -> Callable[[int, int], str]:
    """make_text(seed, words): text that is the same for the same arguments."""
    return some_text


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of 40 text files in two subfolders."""
    root = tmp_path / "corpus"
    for index in range(40):
        file = root / ("a" if index % 2 else "b") / f"{index:02}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(some_text(index, 300), encoding="utf-8")
    return root


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A JSONL file of 200 records."""
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps({"text": some_text(i, 60)}) + "\n" for i in range(200)), encoding="utf-8")
    return file


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., PrepareConfig]:
    """A PrepareConfig for a source, with small defaults."""

    def make(source: Path | str, **changes) -> PrepareConfig:
        values = {
            "sources": [str(source)],
            "out": str(tmp_path / "out"),
            "vocab_size": 300,
            "seq_len": 32,
            "validation_fraction": 0.2,
            "workers": 1,
        }
        return PrepareConfig(**(values | changes))

    return make


@pytest.fixture(scope="session")
def write_shards() -> Callable[..., Path]:
    """write_shards(folder, samples, seq_len=8): MDS shards of samples whose tokens are all the sample's number."""

    def write(folder: Path, samples: int, seq_len: int = 8, text_bytes: bool = False, **options) -> Path:
        import numpy as np
        from streaming import MDSWriter

        columns = {"tokens": f"ndarray:uint16:{seq_len}"} | ({"text_bytes": "int"} if text_bytes else {})
        options = {"compression": "zstd", "hashes": ["xxh64"], "size_limit": 600} | options
        with MDSWriter(columns=columns, out=str(folder), **options) as writer:
            for index in range(samples):
                writer.write(
                    {"tokens": np.full(seq_len, index, np.uint16)} | ({"text_bytes": index} if text_bytes else {})
                )
        return folder

    return write
