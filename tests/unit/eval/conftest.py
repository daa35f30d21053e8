"""A tokenizer, and tasks that are written for a test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.eval.native_task import NativeTask, load_task
from tests.support.icl import byte_level


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    return byte_level()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., NativeTask]:
    """make(records, convention, **settings): a task of a YAML and a JSONL file; records may be lines of text."""

    def made(records: list[Any], convention: str = "lm-eval", **settings: Any) -> NativeTask:
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        task = {"name": "mine", "type": "multiple_choice", "source": {"path": "x.jsonl"}} | settings
        (tmp_path / "mine.yaml").write_text(json.dumps(task), encoding="utf-8")
        return load_task(tmp_path / "mine.yaml", convention)

    return made
