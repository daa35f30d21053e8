"""The making of one prepared folder: its tokenizer, its partitions, and their merging. `prepare` says what holds of the result."""

import hashlib
import json
import platform
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from llmtrain import __version__
from llmtrain.config.output_folder import make_marked, replace_file, working_folder
from llmtrain.config.regular_file import read_bytes, read_text
from llmtrain.data.chat.prepare import chat_settings, key_of, train_tokenizer
from llmtrain.data.chat.recognise import recognised
from llmtrain.data.chat.samples import ChatSettings
from llmtrain.data.partitions.cutting import Partition, cut, identify
from llmtrain.data.partitions.dedup import find_duplicates, has_hashes, without
from llmtrain.data.partitions.maker import MakeSettings
from llmtrain.data.partitions.merge import TEXT_KEEPERS, merge
from llmtrain.data.partitions.prepared_folder import (
    FORMAT,
    LATER_SETTINGS,
    MANIFEST,
    REPORTS,
    SPLITS,
    describe_inputs,
    file_marks,
    find_reusable,
    fingerprint,
    lock_folder,
    refuse_other,
    setting,
)
from llmtrain.data.partitions.ray_engine import make_partitions_on_ray
from llmtrain.data.partitions.report import PartitionReport, copy_partition, read_report
from llmtrain.data.partitions.stored_folder import StoredFolder
from llmtrain.data.partitions.workers import Task, available_cores, make_partitions
from llmtrain.data.prepare_problems import refuse_own_folder, refuse_token_files
from llmtrain.data.shards.packing import token_dtype
from llmtrain.data.sources.files import PassedOver, PrepareError, list_files, named_twice
from llmtrain.data.sources.sample import proof_texts
from llmtrain.data.sources.tolerance import Tolerance
from llmtrain.data.tokenize.encode import DocumentMarks
from llmtrain.data.tokenize.engine_choice import EngineChoice, choose_engine
from llmtrain.data.tokenize.engines import EngineError
from llmtrain.data.tokenize.tokenizer import TextTokenizer, load_tokenizer
from llmtrain.logs import log
from llmtrain.progress import ByteBar
from llmtrain.schema.data import PrepareConfig
from llmtrain.versions import version


@dataclass(frozen=True)
class Part:
    """Share of the work for one of several processes: every `count`-th partition, from the `index`-th, both from 1."""

    index: int
    count: int


class PartState(Enum):
    """State in which `prepare_part` leaves a part."""

    HASHED = "hashed"
    """With `dedup`, while other parts have not hashed their documents: once they have, the same call makes the partitions."""
    MADE = "made"
    MERGED = "merged"
    """All parts had been merged before: the folder is complete."""


class FolderMaker:
    """The making of one folder, in `folder`, which stays until it is complete. Raises PrepareError for its sources."""

    def __init__(self, config: PrepareConfig, out: Path, address: str | None) -> None:
        self.out, self.folder = out, working_folder(out)
        self.store = StoredFolder.of(address, self.folder, config) if address else None
        self.config = config = recognised(config)
        self.passed_over = PassedOver()
        self.chat: ChatSettings | None = None
        self.tolerance = Tolerance(config.max_bad, config.skip_bad_records)
        self.files = list_files(config.sources, self.passed_over)
        self.total = sum(file.size for file in self.files)
        if again := named_twice(self.files):
            log.warning(
                f"files that several sources hold are read as often: {len(again):,}, the first of them {again[0]}"
            )
        refuse_own_folder(out, self.files)
        if config.vocab_size:
            refuse_token_files(self.files)

    def describe(self) -> dict[str, Any]:
        """All inputs that the folder depends on."""
        self.marks = file_marks(self.files)
        inputs = describe_inputs(self.config, self.files, self.marks)
        if self.config.chat is not None:
            self.chat = chat_settings(
                self.config, load_tokenizer(self.config.tokenizer) if self.config.tokenizer else None
            )
            template = self.chat.template if self.chat else None
            inputs["chat_template"] = template and template.digest
        self.text_key = key_of(self.config, self.chat)
        return inputs

    def find_reusable(self, inputs: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
        """See prepared_folder.find_reusable."""
        if self.store is None:
            return find_reusable(self.out, inputs, overwrite)
        manifest = None if overwrite else self.store.manifest()
        if manifest is not None:
            refuse_other(self.store.address, manifest, inputs)
        return manifest

    def run(self, inputs: dict[str, Any], progress: bool, merge_only: bool) -> dict[str, Any]:
        """Make all partitions and merge them. Returns the manifest."""
        config, folder = self.config, self.folder
        with ByteBar(progress, self.total * (1 + config.dedup)) as bar:
            bar.stage("tokenizer")
            tokenizer = self._tokenizer(inputs)
            bar.stage("shards")
            tasks = self._tasks(self._partitions(tokenizer))
            if config.dedup:
                self._hash(tasks, tokenizer, bar, merge_only)
                tasks = self._without_duplicates(tasks)
            self._tell_stale([task.partition for task in tasks])
            reports = self._make(tasks, tokenizer, bar, merge_only)
            bar.stage("merging")
            if self.store:
                self.store.fetch(reports)
            partitions = [task.partition for task in tasks]
            counts = merge(
                folder, config, tokenizer.vocab_size, self._marks(tokenizer), partitions, reports, self.passed_over
            )
        first = counts.pop("first_token")
        manifest = {
            "fingerprint": fingerprint(inputs),
            "inputs": inputs,
            "tokenizer": {
                "vocab_size": tokenizer.vocab_size,
                "eod_token": tokenizer.eod_token,
                "eod_id": tokenizer.eod_id,
                "digest": hashlib.blake2b(read_bytes(folder / "tokenizer/tokenizer.json"), digest_size=16).hexdigest(),
                **(
                    {"begin_id": first}
                    if first is not None and first in (tokenizer.eod_id, tokenizer.role_id("bos"))
                    else {}
                ),
            },
            "seq_len": config.seq_len,
            "dtype": token_dtype(tokenizer.vocab_size),
            **counts,
            "versions": {
                "python": platform.python_version(),
                "llmtrain": __version__,
                **{name: version(name) for name in ("mosaicml-streaming", "tokenizers", "numpy")},
            },
        }
        replace_file(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
        if self.store:
            self.store.publish(reports)
        return manifest

    def run_part(self, inputs: dict[str, Any], progress: bool, part: Part) -> PartState:
        """Make the partitions of one part, or only hash their documents while another part has not."""
        mine = slice(part.index - 1, None, part.count)
        total = self.total * (1 + self.config.dedup) // part.count
        with ByteBar(progress, total, f"part {part.index} of {part.count}") as bar:
            bar.stage("tokenizer")
            with lock_folder(self.out.with_name(f"{self.out.name}.tokenizer")):
                tokenizer = self._tokenizer(inputs)
            bar.stage("shards")
            tasks = self._tasks(self._partitions(tokenizer))
            if self.config.dedup:
                self._hash(tasks[mine], tokenizer, bar, merge_only=False)
                if self._unhashed(tasks):
                    return PartState.HASHED
                tasks = self._without_duplicates(tasks)
            self._tell_stale([task.partition for task in tasks])
            self._make(tasks[mine], tokenizer, bar, merge_only=False)
        return PartState.MADE

    def _tokenizer(self, inputs: dict[str, Any]) -> TextTokenizer:
        """The tokenizer, in the folder. One that is trained here is trained once."""
        made_from = self.folder / REPORTS / "tokenizer"
        trained = self.config.vocab_size and made_from.is_file() and read_text(made_from) == fingerprint(inputs)
        given = self.folder / "tokenizer" if trained else self.config.tokenizer
        tokenizer = load_tokenizer(given) if given else train_tokenizer([(self.config, self.files)])
        self._marks(tokenizer)  # what it refuses is refused before anything is written
        make_marked(self.folder)
        for name in (*SPLITS, REPORTS):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if trained:
            return tokenizer
        if self.chat is not None and self.chat.template is not None:
            tokenizer = replace(tokenizer, chat_template=self.chat.template.text)
        tokenizer.save(self.folder / "tokenizer")
        replace_file(made_from, fingerprint(inputs).encode())
        return tokenizer

    def _tell_stale(self, partitions: list[Partition]) -> None:
        ids = {partition.id for partition in partitions}
        stale = [file for file in (self.folder / REPORTS).glob("*.json") if file.stem.partition("-")[0] not in ids]
        if stale:
            log.info(
                f"{self.folder} holds {len(stale)} partitions of other settings, or of files that have changed since: they are "
                "made anew"
            )

    def _partitions(self, tokenizer: TextTokenizer) -> list[Partition]:
        config = self.config
        settings = {
            "format": FORMAT,
            "tokenizer": hashlib.blake2b(tokenizer.backend.to_str().encode(), digest_size=16).hexdigest(),
            "eod_id": tokenizer.eod_id,
            **{
                name: getattr(config, name)
                for name in ("seq_len", "text_key", "seed", "validation_fraction", "max_bytes")
            },
            **{
                name: getattr(config, name)
                for name in ("add_bos_token", "add_eos_token", "packing", "compression")
                if getattr(config, name) != LATER_SETTINGS[name]
            },
            **(
                {}
                if self.chat is None
                else {"chat": [setting(config, "chat"), self.chat.template and self.chat.template.text]}
            ),
        }
        return identify(list(cut(self.files, self.text_key)), self.marks, settings)

    def _tasks(self, partitions: list[Partition]) -> list[Task]:
        keeps_text = self.config.validation_fraction > 0
        return [
            Task(partition, self.config.max_bytes, keeps_text and number < TEXT_KEEPERS)
            for number, partition in enumerate(partitions)
        ]

    def _unhashed(self, tasks: list[Task]) -> list[Task]:
        return [task for task in tasks if not has_hashes(self.folder / REPORTS, task.partition)]

    def _hash(self, tasks: list[Task], tokenizer: TextTokenizer, bar: ByteBar, merge_only: bool) -> None:
        """Hash the documents of the partitions, of those that have no hashes yet."""
        todo = [replace(task, only_hashes=True) for task in self._unhashed(tasks)]
        if merge_only and todo:
            raise PrepareError(_missing(self.folder, todo, len(tasks)))
        bar.advance(sum(task.partition.stored_bytes for task in tasks) - sum(t.partition.stored_bytes for t in todo))
        for _ in self._results(todo, self._settings(tokenizer, EngineChoice()), bar):
            pass

    def _without_duplicates(self, tasks: list[Task]) -> list[Task]:
        copies = find_duplicates(self.folder / REPORTS, [task.partition for task in tasks])
        return [
            replace(task, partition=without(task.partition, positions), duplicates=positions)
            for task, positions in zip(tasks, copies, strict=True)
        ]

    def _make(
        self, tasks: list[Task], tokenizer: TextTokenizer, bar: ByteBar, merge_only: bool
    ) -> list[PartitionReport]:
        """Reports of the tasks, in their order, up to the one that reaches max_bytes."""
        made: dict[int, PartitionReport] = {}
        there = self.store.sizes() if self.store else {}
        for number, task in enumerate(tasks):
            if report := self._finished(task, there):
                made[number] = report
                bar.advance(task.partition.stored_bytes)
        todo = [number for number in range(len(tasks)) if number not in made]
        if merge_only and todo:
            raise PrepareError(_missing(self.folder, [tasks[number] for number in todo], len(tasks)))
        settings = self._settings(tokenizer, self._engine(tokenizer) if todo else EngineChoice())
        with closing(self._results([tasks[number] for number in todo], settings, bar)) as results:
            while (last := self._last(made, len(tasks))) is None:
                at, report = next(results)
                assert report is not None
                made[todo[at]] = report
                if report.bad_count or report.passed_over_count:
                    self._refuse_bad(made)
        self._refuse_bad(made)  # what was made before may have been allowed more
        before = sum(made[number].read_bytes for number in range(last))
        reports = [made[number] for number in range(last + 1)]
        if self.config.max_bytes is not None and last and before + reports[-1].read_bytes > self.config.max_bytes:
            left = self.config.max_bytes - before
            partition = Partition(f"{tasks[last].partition.id}-{left}", tasks[last].partition.slices)
            task = replace(tasks[last], partition=partition, limit=left)
            [(_, report)] = make_partitions([task], settings, 1, bar.advance)
            assert report is not None
            reports[-1] = report
        return reports

    def _last(self, made: dict[int, PartitionReport], count: int) -> int | None:
        """Number of the last task that is needed; None while it is not known."""
        if self.config.max_bytes is None:
            return count - 1 if len(made) == count else None
        read = 0
        for number in range(count):
            if number not in made:
                return None
            read += made[number].read_bytes
            if read >= self.config.max_bytes:
                return number
        return count - 1

    def _finished(self, task: Task, there: dict[str, int]) -> PartitionReport | None:
        """The report of a partition that was made before: for this folder, or for the one that it replaces. there: see
        StoredFolder.sizes."""
        if self.store:
            report = self.store.report(task.partition.id, there)
            if report and self._serves(report, task):
                return report
        for folder in (self.folder, self.out):
            report = read_report(folder, task.partition.id)
            if not report or not self._serves(report, task):
                continue
            if folder == self.folder or copy_partition(folder, self.folder, report):
                if self.store:
                    self.store.bring(report)
                return report
        return None

    def _serves(self, report: PartitionReport, task: Task) -> bool:
        return report.keeps_text >= task.keeps_text and self.tolerance.serves(report)

    def _refuse_bad(self, made: dict[int, PartitionReport]) -> None:
        self.tolerance.refuse_sum([made[number] for number in sorted(made)], self.files)

    def _results(
        self, tasks: list[Task], settings: MakeSettings, bar: ByteBar
    ) -> Generator[tuple[int, PartitionReport | None]]:
        workers = self.config.workers
        if self.config.engine == "ray":
            return make_partitions_on_ray(tasks, settings, workers, bar.advance)
        return make_partitions(tasks, settings, workers or available_cores(), bar.advance)

    def _engine(self, tokenizer: TextTokenizer) -> EngineChoice:
        if self.chat is not None:
            return EngineChoice()
        wanted, settings = self.config.tokenizer_engine, tokenizer.backend.to_str()
        sample = proof_texts(self.files, self.config.text_key) if wanted != "tokenizers" else []
        try:
            choice = choose_engine(wanted, settings, sample)
        except EngineError as error:
            raise PrepareError(
                f"tokenizer_engine: {error}; leave it at auto, which takes the fastest engine that is equal to tokenizers"
            ) from error
        log.info(f"tokenizer engine: {choice.note}")
        return choice

    def _marks(self, tokenizer: TextTokenizer) -> DocumentMarks:
        bos_id = tokenizer.bos_id if self.config.add_bos_token else None
        return DocumentMarks(tokenizer.eod_id, bos_id, self.config.add_eos_token)

    def _settings(self, tokenizer: TextTokenizer, engine: EngineChoice) -> MakeSettings:
        config = self.config
        return MakeSettings(
            folder=self.folder,
            tokenizer=tokenizer.backend.to_str(),
            engine=engine,
            marks=self._marks(tokenizer),
            vocab_size=tokenizer.vocab_size,
            seq_len=config.seq_len,
            packing=config.packing,
            compression=config.compression,
            text_key=self.text_key,
            seed=config.seed,
            validation_fraction=config.validation_fraction,
            tolerance=self.tolerance,
            chat=self.chat,
            store=self.store,
        )


def _missing(folder: Path, tasks: list[Task], count: int) -> str:
    first = tasks[0].partition.slices[0]
    return (
        f"{len(tasks)} of {count} partitions are not in {folder} yet, the first of them from byte {first.begin:,} of "
        f"{first.file.path}; run the parts that are missing with --part, or the same command without --merge, which makes them"
    )
