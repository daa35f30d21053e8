"""Tasks of our own YAMLs, with the prompts of LLM Foundry's or lm-evaluation-harness's convention. No torch here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llmtrain.eval.errors import DOCUMENT_SECONDS, BadDocuments, EvalError, LimitExceeded, prefixed, time_limit
from llmtrain.eval.instructions import check_libraries
from llmtrain.eval.prompts import foundry, lm_eval
from llmtrain.eval.prompts.encode import encode, shortened
from llmtrain.eval.prompts.few_shot import check_pool
from llmtrain.eval.prompts.foundry import FoundryWriter
from llmtrain.eval.prompts.lm_eval import LmEvalWriter
from llmtrain.eval.prompts.requests import Request, Response
from llmtrain.eval.report.metrics import DocumentMetrics, Metrics, aggregate
from llmtrain.eval.report.process_results import process_results
from llmtrain.eval.task import Documents, Prompting, Task
from llmtrain.eval.tasks.config import CONVENTIONS, WITHOUT_EXAMPLES, Convention, TaskConfig, TaskType
from llmtrain.eval.tasks.documents import Document, DocumentTemplates, Instructed, group_by_category, without_reasoning
from llmtrain.eval.tasks.load import check_known, find_yaml, read_section
from llmtrain.eval.tasks.sections import ConventionSettings, LmEvalPrompting, Source
from llmtrain.eval.tasks.sources import read_records


@dataclass(frozen=True)
class NativeTask(Task):
    """Task of llmtrain's own YAML under one convention. base: folder to which the source's paths are relative."""

    config: TaskConfig
    convention: Convention
    source: Source
    base: Path

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def type(self) -> TaskType:
        return self.config.type

    @property
    def without_examples(self) -> str | None:
        return WITHOUT_EXAMPLES.get(self.type)

    @property
    def rolling(self) -> bool:
        return self.type == "perplexity"

    def measured(self, pmi: bool = True) -> list[str]:
        return [name for name in self.config.metrics(self.convention) if pmi or name != "acc_pmi"]

    def described(self) -> dict[str, Any]:
        other = {"name", "about", "source", "local", "shots", "conventions", *CONVENTIONS, "lm_eval"}
        own = self.settings.model_dump(mode="json", exclude={"shots"})
        return self.config.model_dump(mode="json", exclude=other) | {
            f"{self.convention}.{k}": v for k, v in own.items()
        }

    @property
    def shots(self) -> list[int]:
        return self.settings.shots or self.config.shots

    @cached_property
    def settings(self) -> ConventionSettings:
        return self.config.section(self.convention)

    def window(self, max_seq_len: int) -> int:
        """Most tokens of context and continuation together.

        The last token of a continuation is predicted but not read, so lm-evaluation-harness has one token more than LLM Foundry.
        """
        return max_seq_len + (self.convention == "lm-eval")

    def documents(self, limit: int | None = None) -> Documents[Document]:
        bad: dict[str, str] = {}
        everything = self._read(bad)
        examples = self._read(bad, few_shot=True) if self._has_own_examples() else None
        if not everything and not bad:
            raise EvalError(f"task {self.name}: its source holds no documents")
        evaluated = [one for group in group_by_category(everything).values() for one in group[:limit]]
        documents = Documents(evaluated, everything, examples, bad)
        if bad:
            raise BadDocuments(self.name, bad, documents)
        return documents

    def _read(self, bad: dict[str, str], few_shot: bool = False) -> list[Document]:
        """Documents of the source, or its examples. bad: takes the reasons of records that make none, by location."""
        templates = DocumentTemplates(self.config, self.source, self.convention)
        made: list[Document] = []
        with prefixed(f"task {self.name}"):
            for record in read_records(self.source, self.base, few_shot=few_shot, bad=bad):
                try:
                    made.append(templates.document(record, len(made)))
                except LimitExceeded as error:
                    raise EvalError(f"{record.where}: {error}") from None
                except EvalError as error:
                    bad[record.where] = str(error)
        missing = without_reasoning(made)
        bad.update(missing)
        return [one for one in made if one.where not in missing]

    def _has_own_examples(self) -> bool:
        wanted = self.settings.few_shot_from or ("documents" if self.convention == "foundry" else "few_shot")
        return wanted == "few_shot" and self.source.few_shot is not None

    def _check_pools(self, documents: Documents[Document], shots: int) -> None:
        contents = [document.content for document in documents.evaluated]
        with prefixed(f"task {self.name}"):
            check_libraries(
                one for content in contents if isinstance(content, Instructed) for one in content.instructions
            )
        in_pool = documents.examples is None
        one_more = (
            LmEvalWriter(self.settings).excludes_document(in_pool)
            if isinstance(self.settings, LmEvalPrompting)
            else in_pool
        )
        for category, _, pool in self._example_pools(documents) if shots else ():
            check_pool(self.name, len(pool), shots, one_more, category)

    def _example_pools(
        self, documents: Documents[Document]
    ) -> Iterator[tuple[str | None, list[Document], list[Document]]]:
        """(category, its evaluated documents, the documents to draw its examples from)."""
        pools = group_by_category(documents.everything if documents.examples is None else documents.examples)
        for category, group in group_by_category(documents.evaluated).items():
            yield category, group, pools.get(category, [])

    def _batches(self, documents: Documents[Document], how: Prompting) -> Iterator[list[Request]]:
        in_pool, everything = documents.examples is None, group_by_category(documents.everything)
        for category, group, pool in self._example_pools(documents):
            if isinstance(self.settings, LmEvalPrompting):
                plain = self.settings.continuation is None and self.config.continuation is None
                writer = LmEvalWriter(self.settings, plain, how.style, how.bad)
                encoding = lm_eval.ENCODING
            else:
                writer, encoding = FoundryWriter(self.settings, how.tokenizer), foundry.ENCODING
            limits = writer.generation_limits(everything[category], how.tokenizer) if self.config.generates else None
            prompts = (one for one in writer.prompts(group, pool, how.shots, in_pool) if how.pmi or not one.premise)
            cut = prompts if how.whole else map(shortened, prompts)
            yield from encode(cut, encoding, how.tokenizer, limits, how.bad)

    def metrics(
        self, documents: Documents[Document], requests: Sequence[Request], results: Sequence[Response]
    ) -> Metrics:
        per_document = [
            self._scored(document, some)
            for document, some in zip(documents.evaluated, self._responses(documents, requests, results), strict=True)
        ]
        names = [name for name in self.measured() if all(name in one.values for one in per_document)]
        values, categories = aggregate(per_document, names, macro=self.convention == "foundry")
        truncated = sum(one.truncated for one in per_document)
        return Metrics(self.metric, values, len(per_document), len(requests), truncated, categories, per_document)

    def _scored(self, document: Document, results: Any) -> DocumentMetrics:
        with prefixed(document.where), time_limit(DOCUMENT_SECONDS, "its answer's extraction and comparison"):
            return process_results(document, results, self.settings)


def load_task(name: str | Path, convention: str, data_dir: str | Path | None = None) -> NativeTask:
    """Load a task from its YAML (a path, or the name of a shipped one) under a convention, `foundry` or `lm-eval`.

    data_dir: folder of local files, used in place of the task's source (its `local`). Raises ConfigError that lists all errors of
    the YAML, or EvalError.
    """
    check_known(convention, CONVENTIONS, "convention")
    file = find_yaml(name, "tasks")
    config = read_section(file, TaskConfig)
    if convention not in config.conventions:
        known = " or ".join(config.conventions)
        raise EvalError(f"{file}: the task has no prompts of convention {convention}; run it with convention: {known}")
    if data_dir is None:
        return NativeTask(config, convention, config.source, file.parent)
    if config.local is None:
        own = next((key for key in ("path", "mds", "text") if getattr(config.source, key) is not None), None)
        advice = "" if own is None else f"; `local: {{{own}: {getattr(config.source, own)}}}` reads that name there"
        raise EvalError(
            f"{file}: the data folder {data_dir} is given, but the task has no `local` that says what to look for "
            f"there{advice}"
        )
    return NativeTask(config, convention, config.local, Path(data_dir).expanduser())
