"""`llmtrain decontaminate`: the documents of tasks that occur in the training data."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmtrain.config.output_folder import unwritable_reason
from llmtrain.data.tokenize.tokenizer import TextTokenizer, load_tokenizer
from llmtrain.eval.decontamination.decontaminate import Overlap, Sample, decontaminate, mds_samples, text_samples
from llmtrain.eval.errors import EvalError
from llmtrain.eval.prepare import read_documents
from llmtrain.eval.report.files import write_text
from llmtrain.eval.report.gauntlet import load_gauntlet
from llmtrain.eval.run_config import load_eval_run, task_runs
from llmtrain.eval.tasks.sources import open_mds
from llmtrain.logs import log
from llmtrain.progress import Bar
from llmtrain.tables import markdown_table

_WHOLE = 0.8
"""Least share of a document's n-grams for `whole` in the report."""


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises UserError for a YAML, data or tokenizer that cannot be used, and, once the others are compared and
    written, for tasks whose documents cannot be read."""
    given = {name: getattr(args, name) for name in ("data_dir", "limit") if getattr(args, name) is not None}
    settings = load_eval_run(
        args.file, [f"{key}={json.dumps(value)}" for key, value in given.items()], needs_models=False
    )
    out = args.out or Path(settings.out)
    if reason := unwritable_reason(out):
        raise EvalError(f"--out {out}: {reason}")
    sources = [_source(path) for path in args.data]
    tokenizer = _tokenizer(args.tokenizer, sources)
    runs = task_runs(settings, load_gauntlet(settings.gauntlet) if settings.gauntlet else None)
    wanted = {one.task.name: one.task for one in runs}
    log.info(f"reading the documents of {len(wanted)} tasks")
    tasks, failed = {}, {}
    for name, task in wanted.items():
        try:
            tasks[name] = read_documents(task, settings).evaluated
        except EvalError as error:
            failed[name] = str(error)
    if not tasks:
        raise _failed_tasks(failed)
    with _Bars(sources) as bars:
        samples = bars.watch(tokenizer, args.text_key)
        overlaps = decontaminate(tasks, samples, tokenizer, n=args.n, progress=bars.progress)
    content = _content(overlaps, [str(path) for path, _ in sources], args.n, bars)
    if failed:
        content["failed"] = [{"task": name, "reason": reason} for name, reason in failed.items()]
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "overlap.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    text = as_markdown(content)
    write_text(out / "overlap.md", text)
    print(f"{text}\nwritten: {out / 'overlap.json'}, {out / 'overlap.md'}", flush=True)
    if failed:
        raise _failed_tasks(failed)
    return 0


def _failed_tasks(reasons: dict[str, str]) -> EvalError:
    return EvalError("\n".join(f"{task}: not compared: {reason}" for task, reason in reasons.items()))


def _source(path: Path) -> tuple[Path, bool]:
    """(path to read, True for MDS shards); of a folder that `llmtrain prepare` wrote, its training split."""
    path = path.expanduser()
    if not path.exists():
        raise EvalError(f"{path}: no such file or folder")
    folder = path / "train" if (path / "train" / "index.json").is_file() else path
    is_shards = any(any(folder.glob(pattern)) for pattern in ("index.json", "*.mds*", "*/index.json"))
    if is_shards:
        open_mds(folder)  # it has an index
    return folder, is_shards


def _tokenizer(name: str | None, sources: Sequence[tuple[Path, bool]]) -> TextTokenizer:
    """Tokenizer of that name, or the one that `llmtrain prepare` wrote beside the shards."""
    beside: dict[Path, TextTokenizer] = {}
    for folder, is_shards in sources:
        place = folder.parent / "tokenizer"
        if is_shards and place.is_dir():
            beside[place] = load_tokenizer(place)
    if name is None and not beside:
        shown = ", ".join(str(path) for path, _ in sources)
        raise EvalError(f"{shown}: there is no tokenizer beside the data; name the one it was made with by --tokenizer")
    tokenizer = load_tokenizer(name) if name is not None else next(iter(beside.values()))
    for place, other in beside.items():
        if other.backend.to_str() != tokenizer.backend.to_str():
            used = name or str(next(iter(beside)))
            raise EvalError(
                f"the shards at {place.parent} were made with {place}, which is another tokenizer than {used}: their token "
                "ids cannot be compared" + ("; leave --tokenizer out" if name else "; check them one by one")
            )
    return tokenizer


class _Bars(Bar):
    """Progress bars on a terminal, one per source, with counts of samples and tokens."""

    def __init__(self, sources: Sequence[tuple[Path, bool]]):
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn

        super().__init__(sys.stderr.isatty(), None, TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._sources = sources
        self.samples = self.tokens = 0

    def watch(self, tokenizer: TextTokenizer, text_key: str) -> Iterator[Sample]:
        """All samples of all sources. Raises EvalError for a source that has none, and for ids of another tokenizer."""
        for path, is_shards in self._sources:
            self._task = self._bar.add_task(str(path), total=None)
            before = self.samples
            for sample in mds_samples(path, tokenizer) if is_shards else text_samples([path], tokenizer, text_key):
                if len(sample.ids) and (largest := sample.ids.max()) >= tokenizer.vocab_size:
                    raise EvalError(
                        f"{sample.where} holds token {largest}, but the tokenizer has {tokenizer.vocab_size}: it is not the "
                        "one the shards were made with; name that one by --tokenizer"
                    )
                self.samples += 1
                self.tokens += len(sample.ids)
                yield sample
            if self.samples == before:
                raise EvalError(f"{path} is empty: there is nothing to compare the tasks with")

    def progress(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)


def _content(overlaps: Sequence[Overlap], data: Sequence[str], n: int, read: _Bars) -> dict[str, Any]:
    tasks = [
        {
            "task": one.task,
            "documents": one.documents,
            "checked": one.checked,
            "hit": len(one.hits),
            "whole": sum(hit.share >= _WHOLE for hit in one.hits),
            "share": one.share,
            "hits": [asdict(hit) for hit in one.hits],
        }
        for one in overlaps
    ]
    return {"n": n, "data": list(data), "samples": read.samples, "tokens": read.tokens, "tasks": tasks}


def as_markdown(content: dict[str, Any]) -> str:
    """Table of overlap.md. content: that of overlap.json."""
    lines = [
        f"n-grams of {content['n']} tokens, {content['tokens']:,} tokens in {content['samples']:,} samples of "
        f"{', '.join(content['data'])}",
        "",
    ]
    heads = ["task", "documents", "long enough to check", "hit", "hit, %", f"at least {_WHOLE:.0%} of it found"]
    counts = [
        [one[key] for key in ("task", "documents", "checked", "hit", "share", "whole")] for one in content["tasks"]
    ]
    lines += markdown_table(heads, [[*map(str, row[:4]), f"{100 * row[4]:.2f}", str(row[5])] for row in counts])
    if "failed" in content:
        lines += ["", "Not compared:", ""]
        lines += [f"- {one['task']}: {' '.join(one['reason'].split())}" for one in content["failed"]]
    return "\n".join(lines) + "\n"
