"""`llmtrain data show | stats | seen | verify`: what is in prepared data, and what a run reads of it. Declaring them imports no
torch."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmtrain.commands.arguments import output_path, positive
from llmtrain.commands.data_target import SPLITS, TARGET, Target, open_run, open_target
from llmtrain.errors import UserError
from llmtrain.tables import aligned

if TYPE_CHECKING:
    from llmtrain.data.inspect.sample_documents import SampleDocuments
    from llmtrain.data.inspect.seen import SeenData
    from llmtrain.data.inspect.statistics import SourceStatistics
    from llmtrain.data.shards.stored_stream import StoredStream
    from llmtrain.data.tokenize.tokenizer import TextTokenizer

_SHOWN = 3
_MOST_SHOWN = 10_000


def add_data(commands) -> None:
    parser = commands.add_parser("data", help="look into prepared data, and at what a run reads of it")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    sub = actions.add_parser(
        "show",
        help="samples as text, with the borders of documents marked",
        description=f"Prints samples: the first {_SHOWN}, those of --ids, or the batch of a step of a run.",
    )
    _add_target(sub)
    sub.add_argument("--split", choices=SPLITS, default="train", help="default: train")
    sub.add_argument("--stream", metavar="NAME", help="of a YAML or a run with several; default: the first")
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--ids", type=_ranges, metavar="A,B:C", help="numbers of samples, from 0; B:C is B to C")
    which.add_argument("--step", type=positive, metavar="N", help="the batch of this step of a run, from 1")
    _add_tokenizer(sub)
    sub.set_defaults(func=run_show)

    sub = actions.add_parser(
        "stats",
        help="statistics of each source: documents, their lengths, bytes per token, frequent tokens",
        description="Reads all shards, one after the other.",
    )
    _add_target(sub)
    sub.add_argument("--split", choices=SPLITS, help="default: all")
    sub.add_argument("--top", type=positive, default=10, metavar="N", help="most frequent tokens to list (default 10)")
    sub.add_argument("--json", action="store_true", help="print all of it as JSON")
    sub.add_argument(
        "--out", type=output_path, metavar="DIR", help="gets pictures: SPLIT-lengths.png, SPLIT-tokens.png"
    )
    _add_tokenizer(sub)
    sub.set_defaults(func=run_stats)

    sub = actions.add_parser(
        "seen",
        help="the samples and documents that a run takes at given steps",
        description="Computes the run's order of samples again, which does not depend on ranks: shards are not read. Prints the "
        "share of each stream, then every sample with its documents.",
    )
    sub.add_argument("target", metavar="RUN", help="a run's folder, a checkpoint in one, or a run's YAML")
    sub.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings in place of a YAML's")
    sub.add_argument(
        "--steps", type=_step_range, required=True, metavar="A:B", help="from step A to step B, both from 1"
    )
    sub.add_argument("--json", action="store_true", help="a line of JSON per sample")
    sub.add_argument("--shares", action="store_true", help="only the share of each stream")
    sub.add_argument("--out", type=output_path, metavar="FILE.png", help="gets a picture of the shares over the steps")
    sub.set_defaults(func=run_seen)

    sub = actions.add_parser(
        "verify",
        help="compare every shard with its index",
        description="Reads every byte, and writes nothing. Exit status 1 when anything is wrong; each file that is, is named.",
    )
    _add_target(sub)
    sub.set_defaults(func=run_verify)


def _add_target(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("target", metavar="DATA", help=TARGET)
    sub.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings in place of a YAML's")


def _add_tokenizer(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--tokenizer", metavar="NAME", help="folder, tokenizer.json or hub name; default: beside the shards"
    )


def _ranges(text: str) -> list[int]:
    """The numbers of `3,8:10`: 3, 8, 9, 10."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", part.strip())
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise argparse.ArgumentTypeError(f"{text}: expected numbers of samples such as 3,8:10")
        if int(match[2] or match[1]) - int(match[1]) >= _MOST_SHOWN:
            raise argparse.ArgumentTypeError(f"{text}: at most {_MOST_SHOWN:,} samples at a time")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def _step_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", text)
    if not match or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise argparse.ArgumentTypeError(f"{text}: expected A:B with steps from 1, such as 100:200")
    return int(match[1]), int(match[2] or match[1])


def _print(lines: Iterable[str]) -> int:
    """Print lines, of any characters, as long as anyone reads them. Returns the exit status."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would fail when it ends
    return 0


def run_show(args: argparse.Namespace) -> int:
    return _print(_shown(args))


def _shown(args: argparse.Namespace) -> Iterator[str]:
    from llmtrain.data.inspect.show import SampleView
    from llmtrain.data.tokenize.end_of_document import recorded_begins

    target = open_target(args.target, args.overrides)
    samples = list(_chosen(target, args))
    streams = [stream for stream, _, _ in samples]
    tokenizer = _tokenizer(args.tokenizer, streams)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    look_ups: dict[str, SampleDocuments] = {}
    for stream, number, known_as in samples:
        shard, row = stream.shard_of(number)
        tokens = stream.tokens(shard)[row]
        name = stream.index.shards[shard]["raw_data"]["basename"]
        if stream.name not in look_ups:
            look_ups[stream.name] = stream.documents(len(tokens))
        documents = look_ups[stream.name].of(number)
        view = SampleView(tokenizer, recorded_begins(stream.manifest), colour)
        flags = stream.flags(shard)
        of_row = None if flags is None else flags[row]
        numbers = {key: values[row] for key, values in stream.columns(shard).items() if values.ndim == 1}
        listed = "".join(f", {key} {value:g}" for key, value in numbers.items() if key != "text_bytes")
        yield from view.lines(f"sample {known_as} ({name}, row {row}{listed})", tokens, documents, of_row)


def _chosen(target: Target, args: argparse.Namespace) -> Iterator[tuple[StoredStream, int, str]]:
    """(stream, number of the sample in it, name of the sample) of what is to be shown."""
    if args.step is not None:
        if target.run is None or args.split != "train":
            raise UserError("--step is of a run: give its folder or its YAML, and not --split validation")
        seen = _seen(args.target, args.overrides, (args.step, args.step))
        for sample in sorted(seen.order.ids(range(args.step - 1, args.step))[0].tolist()):  # by shard
            stream, number = seen.place(sample)
            yield stream, number, f"{sample} of step {args.step}, {number} of {stream.name}"
        return
    streams = target.streams.get(args.split)
    if not streams:
        raise UserError(f"{args.target} has no {args.split} data")
    stream = next((one for one in streams if args.stream in (None, one.name)), None)
    if stream is None:
        raise UserError(f"there is no stream {args.stream}; there is {', '.join(one.name for one in streams)}")
    for number in args.ids if args.ids is not None else range(min(_SHOWN, stream.index.samples)):
        stream.shard_of(number)  # so that a wrong number is said before anything is printed
        yield stream, number, f"{number} of {stream.name}"


def _tokenizer(name: str | None, streams: Sequence[StoredStream]) -> TextTokenizer | None:
    from llmtrain.data.shards.stored_stream import find_tokenizer
    from llmtrain.data.tokenize.tokenizer import load_tokenizer

    if name is not None:
        return load_tokenizer(name)
    found = find_tokenizer(streams)
    if found is None:
        print(
            "no tokenizer/ beside the shards: tokens are shown as numbers; name one with --tokenizer", file=sys.stderr
        )
    return found


def run_stats(args: argparse.Namespace) -> int:
    from llmtrain.data.inspect.show import printable
    from llmtrain.data.inspect.statistics import stream_statistics
    from llmtrain.data.tokenize.end_of_document import DocumentEnds, recorded_begins
    from llmtrain.progress import ByteBar

    target = open_target(args.target, args.overrides)
    splits = [args.split] if args.split else list(target.streams)
    if missing := [split for split in splits if split not in target.streams]:
        raise UserError(f"{args.target} has no {missing[0]} data")
    streams = [(split, stream) for split in splits for stream in target.streams[split]]
    tokenizer = _tokenizer(args.tokenizer, [stream for _, stream in streams])
    found: dict[str, list[SourceStatistics]] = {split: [] for split in splits}
    for split, stream in streams:
        manifest = stream.manifest
        counts = manifest["splits"].get(stream.split) if manifest else None
        ends = DocumentEnds(tokenizer.eod_id, recorded_begins(manifest)) if tokenizer else None
        with ByteBar(sys.stderr.isatty() and not args.json, stream.index.samples, stream.name) as bar:
            sources = stream_statistics(stream, ends, counts, bar.advance)
        if len(target.streams[split]) > 1:
            sources = [replace(one, name=f"{stream.name}: {one.name}") for one in sources]
        found[split] += sources
    described = {split: [one.described(tokenizer, args.top) for one in sources] for split, sources in found.items()}
    if args.out is not None:
        from llmtrain.data.inspect.pictures import draw_frequencies, draw_lengths

        for split, sources in found.items():
            draw_lengths(sources, args.out / f"{split}-lengths.png")
            draw_frequencies(sources, args.out / f"{split}-tokens.png")
    if args.json:
        return _print([json.dumps(described, indent=1)])
    return _print(printable(line) for split, sources in described.items() for line in _table(split, sources))


def _table(split: str, sources: list[dict[str, Any]]) -> Iterator[str]:
    header = ("", "documents", "tokens", "bytes", "bytes/token", "mean", "1%", "50%", "99%", "longest")
    rows: list[tuple[str, ...]] = [(f"{split}, tokens of a document:", *header[1:])]
    for one in sources:
        lengths = one["tokens_per_document"]
        numbers = [one["documents"], one["tokens"], one["text_bytes"], one["bytes_per_token"], lengths["mean"]]
        numbers += [lengths[name] for name in ("1%", "50%", "99%", "longest")]
        rows.append((f"  {one['name']}", *map(_figure, numbers)))
    yield from aligned(rows)
    for one in sources:
        special = [f"{text} {100 * share:.2f} %" for text, share in one["special_tokens"].items()]
        frequent = [
            f"{token['token'] if token['text'] is None else token['text']!r} {100 * token['share']:.2f} %"
            for token in one["most_frequent"]
        ]
        yield f"  {one['name']}: {one['stored_tokens']:,} tokens stored, {one['distinct_tokens']:,} different ones"
        yield f"    special: {', '.join(special) or 'none'}"
        yield f"    most frequent: {', '.join(frequent)}"


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _seen(target: str, overrides: Sequence[str], steps: tuple[int, int]) -> SeenData:
    """The data of a run. Raises UserError if its shards are others than when it was trained."""
    from llmtrain.data.inspect.seen import SeenData
    from llmtrain.data.shards.checks import fingerprint_of

    run = open_run(target, overrides)
    seen = SeenData(run.data, run.global_batch_size, run.passed_over)
    if run.fingerprint not in (None, fingerprint_of(run.data, [stream.index for stream in seen.streams])):
        raise UserError(f"the shards are not those that {target} was trained on, so that its samples cannot be listed")
    if run.step is not None and steps[1] > run.step:
        print(
            f"the newest checkpoint of {target} is of step {run.step:,}: later steps are those to come", file=sys.stderr
        )
    if seen.unrecorded:
        print(
            f"no documents are listed of {', '.join(seen.unrecorded)}: the shards come without a record of them, which "
            "`llmtrain prepare` makes (with --overwrite, for a folder of an earlier version)",
            file=sys.stderr,
        )
    return seen


def run_seen(args: argparse.Namespace) -> int:
    return _print(_seen_lines(args))


def _seen_lines(args: argparse.Namespace) -> Iterator[str]:
    from llmtrain.data.inspect.sample_documents import summarise
    from llmtrain.data.inspect.seen import share_lines
    from llmtrain.data.inspect.show import printable

    if args.json and args.shares:
        raise UserError("--json is a line per sample, which --shares leaves out; give one of them")
    if args.out is not None and args.out.suffix.lower() != ".png":
        raise UserError(f"--out {args.out}: expected the name of a .png")
    seen = _seen(args.target, args.overrides, args.steps)
    first, last = args.steps
    names = [stream.name for stream in seen.streams]
    if args.out is not None or not args.json:
        counts = seen.counts(first, last)
        if args.out is not None:
            from llmtrain.data.inspect.pictures import draw_shares

            draw_shares(names, first, counts, args.out)
        if not args.json:
            yield from share_lines(names, counts, seen.seq_len)
    for one in () if args.shares else seen.samples(first, last):
        if args.json:
            yield json.dumps(one.as_json())
            continue
        documents = f": {printable(summarise(one.documents))}" if one.documents else ""
        yield f"step {one.step}  sample {one.sample}  {one.stream}/{one.shard}, row {one.row}{documents}"


def run_verify(args: argparse.Namespace) -> int:
    from llmtrain.data.inspect.verify import folder_faults, stored_bytes, stream_faults
    from llmtrain.progress import ByteBar, format_bytes

    damaged: dict[str, str] = {}
    target = open_target(args.target, args.overrides, damaged)
    streams = [stream for found in target.streams.values() for stream in found]
    wrong = len(damaged)
    for fault in damaged.values():
        print(f"WRONG: {fault}")
    with ByteBar(sys.stderr.isatty(), sum(map(stored_bytes, streams)), "verify") as bar:
        for stream in streams:
            faults = 0
            for fault in stream_faults(stream, bar.advance):
                print(f"WRONG: {fault}")
                faults += 1
            if not faults:
                size = format_bytes(stored_bytes(stream))
                where, shards = " and ".join(stream.places), len(stream.index.shards)
                count = f"{shards:,} shard{'s' * (shards != 1)}"
                print(f"{where}: good ({count}, {stream.index.samples:,} samples, {size})")
            wrong += faults
    for folder in target.folders:
        own = [(split, one) for split, found in target.streams.items() for one in found if one.is_in(folder)]
        samples: dict[str, int | None] = {split: one.index.samples for split, one in own}
        samples |= {split: None for split in SPLITS if str(folder / split) in damaged}
        for fault in folder_faults(folder, samples):
            print(f"WRONG: {fault}")
            wrong += 1
    return 1 if wrong else 0
