"""Words of the house: docstrings that begin with a noun or a verb, and names that were replaced for good."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_NO_BEGINNING = {
    *("of", "what", "whether", "where", "how", "why", "which", "who", "when", "so", "as", "in", "by", "for", "from"),
    *("on", "to", "with", "without", "and", "or", "but", "if", "it", "its", "they", "that", "those"),
}
"""Words that begin half a sentence: the reader has to guess the noun."""

_REPLACED = {
    "lockstep": "fsdp_sync",
    "texts that begin alike": "requests that share a prefix",
    "copy engine": "TMA",
    "column_sums": "reduce_partials",
    "moved_to": "async_copy",
    "no_trees": "prefix_context",
    "tuning_files": "tuning",
    "composer_fixes": "the name of what it does",
    "settled_config": "resolve_auto",
    "_untold": "_unreported_bytes",
    "ProvedEngine": "VerifiedTokenizer",
    "awkward_texts": "adversarial_texts",
    "LastQueries": "SuffixAttention",
    "HeldWeights": "PersistentUnshardedWeights",
    "set_aside(": "without_state, move_aside",
    "train.against_graphs": "cuda_graphs_refusal",
    "divide_mlps": "chunk_mlps",
    "is told once": "is reported once",
    "is counted and named in": "is listed in",
    "speaks for": "applies to",
}
"""Former names of ideas, and the field's name instead."""


def _tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout, to know which files are the project's")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def test_docstrings_begin_with_a_noun_or_a_verb():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in _tracked("llmtrain/*.py", "benchmarks/*.py", "scripts/*.py")
        for line, text in _docstrings(path)
        if re.split(r"[\s,:;.]", text, maxsplit=1)[0].lower() in _NO_BEGINNING
    ]
    assert not found, "\n".join(found)


def test_former_names_are_gone():
    pattern = re.compile(rf"(?<![a-z])(?:{'|'.join(map(re.escape, _REPLACED))})(?![a-z])", re.IGNORECASE)
    instead = {word.lower(): name for word, name in _REPLACED.items()}
    found = [
        f"{path.relative_to(ROOT)}:{number}: {former[0]}: say {instead[former[0].lower()]}"
        for path in _tracked("*.py", "*.md", "*.yaml", "*.toml", "*.sh")
        if path != Path(__file__) and pattern.search(text := path.read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1)
        for former in pattern.finditer(line)
    ]
    assert not found, "\n".join(found)
