"""What `llmtrain prepare` has written, read by StreamingDataset's own reader."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from streaming.base.compression import decompress
from streaming.base.format import reader_from_json

from llmtrain.data.tokenize.tokenizer import load_tokenizer
from llmtrain.schema.data import PrepareConfig


def text_of(number: int, words: int = 40) -> str:
    """A text that begins with its number, the same for the same one."""
    rng, some = random.Random(number), ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs"]
    return f"{number} " + " ".join(rng.choice(some) for _ in range(words))


def small(folder: Path, *sources: Path | str, seq_len: int = 32, **settings: Any) -> PrepareConfig:
    """Shards in FOLDER/out by FOLDER/tokenizer, made in this process; nothing is held out."""
    places = {"out": str(folder / "out"), "tokenizer": str(folder / "tokenizer"), "validation_fraction": 0.0}
    return PrepareConfig(**(places | {"sources": [*map(str, sources)], "seq_len": seq_len, "workers": 1} | settings))


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the last shard's entry of a folder of shards."""
    index = json.loads((folder / "index.json").read_text())
    edit(index["shards"][-1])
    (folder / "index.json").write_text(json.dumps(index))


def digests(out: Path) -> dict[str, str]:
    """Contents of every shard, index, tokenizer file and the manifest."""
    files = [file for file in out.rglob("*") if file.is_file()]
    return {str(file.relative_to(out)): hashlib.sha1(file.read_bytes()).hexdigest() for file in files}


def stored_samples(out: Path, split: str) -> list[dict]:
    """All samples of a split, read by streaming's own reader."""
    samples = []
    for shard in json.loads((out / split / "index.json").read_text())["shards"]:
        raw = out.parent / "raw" / split / shard["raw_data"]["basename"]
        raw.parent.mkdir(parents=True, exist_ok=True)
        content = (out / split / (shard["zip_data"] or shard["raw_data"])["basename"]).read_bytes()
        raw.write_bytes(decompress(shard["compression"], content) if shard["zip_data"] else content)
        reader = reader_from_json(str(out.parent / "raw"), split, shard)
        samples += [reader[i] for i in range(len(reader))]
    return samples


def documents(out: Path, split: str) -> list[str]:
    """The documents that a split's samples hold; the last one may be cut."""
    tokenizer = load_tokenizer(out / "tokenizer")
    ids = np.concatenate([sample["tokens"] for sample in stored_samples(out, split)])
    ends = np.flatnonzero(ids == tokenizer.eod_id)
    return [tokenizer.decode(part[part != tokenizer.eod_id].tolist()) for part in np.split(ids, ends + 1)]
