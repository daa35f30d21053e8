"""A task of lm-evaluation-harness behind our scorer: lm_eval writes the prompts and computes the metrics, our models answer.

    task = make_task(read_task_file(path), path, data_dir=None, allow_code=[])

Metrics have the harness's names, so that results compare with its results.json: `acc`, `exact_match,strict-match` (with the
filter's name, but for the filter `none`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.eval.errors import DOCUMENT_SECONDS, EvalError, LimitExceeded, prefixed, time_limit
from llmtrain.eval.lm_eval.settings import Settings, described, read_settings
from llmtrain.eval.prompts.encode import Prompt, encode, shortened
from llmtrain.eval.prompts.few_shot import check_pool
from llmtrain.eval.prompts.lm_eval import ENCODING
from llmtrain.eval.prompts.requests import GeneratedText, GenerateUntilRequest, Loglikelihood, Request, Response
from llmtrain.eval.report.document_scores import describe
from llmtrain.eval.report.metrics import DocumentMetrics, Metrics, WeightedSum, is_perplexity
from llmtrain.eval.report.process_results import until_stop
from llmtrain.eval.task import Documents, Prompting, Task
from llmtrain.eval.tasks.config import WITHOUT_EXAMPLES
from llmtrain.eval.tasks.documents import joined_text

if TYPE_CHECKING:
    from llmtrain.eval.lm_eval.harness_task import HarnessTask

_REHEARSED = 2
"""Documents whose made-up responses are scored before a model is asked; all of them where labels decide what can be computed."""
_FILTER_SECONDS, _ANSWER_SECONDS = 30.0, 0.05
"""Time for the filters of all answers of a task, and beside it for each answer."""


def make_task(
    data: Mapping[str, Any], file: Path, *, data_dir: Path | None = None, allow_code: Sequence[Path] = ()
) -> LmEvalTask:
    """Task from the content of its file (`read_task_file`); reads no data and imports no code.

    data_dir: folder of local files in place of the data set: NAME/SPLIT.jsonl or DATASET/[CONFIG/]SPLIT.jsonl. allow_code:
    folders whose Python files may be imported. Raises EvalError that names the task, the keys and what is wrong with them.
    """
    return LmEvalTask(read_settings(data, file, allow_code), data_dir)


@dataclass(frozen=True)
class LmEvalDocument:
    """One document. index: its number in the evaluated split. where: data set, split and row (from 1)."""

    index: int
    where: str
    record: dict[str, Any] = field(repr=False)
    task: HarnessTask = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        """The document with its right answer as plain text, without examples."""
        texts = self.texts
        return joined_text(texts["prompt"], texts["right"]) if "right" in texts else texts["prompt"]

    @property
    def texts(self) -> dict[str, Any]:
        """Texts for reports: the question (prompt), the right answer, and the choices or further right answers."""
        task, record = self.task, self.record
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            return {"prompt": str(task.doc_to_target(record))}
        asked, answer = task.doc_to_text(record), task.doc_to_target(record)
        choices = task.doc_to_choice(record) if task.config.doc_to_choice is not None else []
        answers = answer if isinstance(answer, list) else [answer]
        asked, *right = (
            choices[one] if isinstance(one, int) and 0 <= one < len(choices) else str(one) for one in (asked, *answers)
        )
        texts: dict[str, Any] = {"prompt": asked, "right": right[0] if right else ""}
        return texts | ({"choices": choices} if choices else {"aliases": right[1:]} if right[1:] else {})


@dataclass(frozen=True)
class LmEvalTask(Task):
    """Task of lm-evaluation-harness. data_dir: as in `make_task`."""

    settings: Settings
    data_dir: Path | None = None

    @property
    def name(self) -> str:
        return self.settings.task

    @property
    def shots(self) -> list[int]:
        return [0 if self.rolling else self.settings.num_fewshot]

    @property
    def without_examples(self) -> str | None:
        return WITHOUT_EXAMPLES["perplexity"] if self.rolling else None

    @property
    def rolling(self) -> bool:
        return self.settings.output_type == "loglikelihood_rolling"

    def measured(self, pmi: bool = True) -> list[str]:
        names = [one.name for one in self.settings.metrics if pmi or one.name != "acc_mutual_info"]
        return [_title(name, chain) for chain in self.settings.chains for name in names]

    def described(self) -> dict[str, Any]:
        return described(self.settings)

    def window(self, max_seq_len: int) -> int:
        return max_seq_len + 1  # the last token of a continuation is predicted but not read

    @cached_property
    def harness(self) -> HarnessTask:
        """lm_eval's task with its data."""
        from llmtrain.eval.lm_eval.harness_task import HarnessTask

        return HarnessTask(self.settings, self.data_dir)

    def documents(self, limit: int | None = None) -> Documents[LmEvalDocument]:
        with prefixed(f"task {self.name}"):
            task = self.harness
            records = list(islice(iter(task.eval_docs), limit))
            found = [LmEvalDocument(number, task.where(number), one, task) for number, one in enumerate(records)]
            self._rehearse(found)
        return Documents(found, found)

    def _rehearse(self, documents: Sequence[LmEvalDocument]) -> None:
        """Score made-up responses, so that a filter or metric that fails is found before a model is asked. A document without a
        right answer is passed over here: its prompts are refused. Raises EvalError."""
        from llmtrain.eval.lm_eval import scores

        if self.settings.own_scoring:
            return
        task = self.harness
        known = task.aggregation()
        count = len(documents) if any(one in scores.LABELS for one in known.values()) else _REHEARSED
        given: list[dict[str, Any]] = []
        for document in documents[:count]:
            try:
                task.check_answer(document.record)
                made_up = [self._made_up(document)]
            except EvalError:
                continue
            [instances] = self._filtered(task, [document], made_up)
            with suppress(EvalError):  # which real answers need not raise
                given += [self._values(task, document, instances, chain) for chain in self.settings.chains]
        values = {name: [one[name] for one in given if name in one] for one in given for name in one}
        for name in [one.name for one in self.settings.metrics if given and one.name not in values]:
            found = ", ".join(values) or "none of those that are listed"
            raise EvalError(
                f"metric_list: there is no metric '{name}' of a {self.settings.output_type} task; it gives {found}"
            )
        for name, items in values.items():
            scores.aggregate(f"metric_list: {name}", known.get(name, scores.metrics.mean), items)

    def _made_up(self, document: LmEvalDocument) -> list[Response]:
        if self.settings.output_type == "generate_until":
            return [GeneratedText("1")]
        if self.settings.output_type != "multiple_choice":
            return [Loglikelihood(-1.0, False, 1)]
        count = len(self.harness.doc_to_choice(document.record))
        found: list[Response] = [
            Loglikelihood(-1.0 - (one != document.index % count), False, 1) for one in range(count)
        ]
        return found * (1 + ("acc_mutual_info" in self.harness.aggregation()))

    def _check_pools(self, documents: Documents[LmEvalDocument], shots: int) -> None:
        if shots:
            with prefixed(f"task {self.name}"):
                pool = len(self.harness.sampler.df)
            check_pool(self.name, pool, shots, self.harness.excludes_document, None)

    def _batches(self, documents: Documents[LmEvalDocument], how: Prompting) -> Iterator[list[Request]]:
        task = self.harness.fresh() if how.shots else self.harness
        task = task if how.pmi else task.without_mutual_information()
        prompts = (one for document in documents.evaluated for one in self._prompts(task, document, how))
        cut = prompts if how.whole else map(shortened, prompts)
        for some in encode(cut, ENCODING, how.tokenizer, self.settings.generation, how.bad):
            yield [one for request in some for one in self._repeated(request)]

    def _repeated(self, request: Request) -> list[Request]:
        """The requests for a document's `repeats`; one alone where all answers are the same."""
        if not isinstance(request, GenerateUntilRequest) or not (request.sampling and request.sampling.temperature):
            return [request]
        return [replace(request, repeat=number) for number in range(self.settings.repeats)]

    def _prompts(self, task: HarnessTask, document: LmEvalDocument, how: Prompting) -> list[Prompt]:
        """Prompts of a document, none if it is bad."""
        try:
            with time_limit(DOCUMENT_SECONDS, "its prompt"):
                task.check_answer(document.record)
                instances = task.instances_of(document.index, document.record, how.shots, how.style)
            arguments: list[Any] = [one.args for one in instances]
            written = task.OUTPUT_TYPE != "generate_until"
            return [
                Prompt(document, number, one[0], str(one[1]) if written else None)
                for number, one in enumerate(arguments)
            ]
        except LimitExceeded as error:
            raise EvalError(f"task {self.name}: {document.where}: {error}") from None
        except Exception as error:  # also of a task's own code
            how.bad[document.index] = str(error) or type(error).__name__
            return []

    def metrics(
        self, documents: Documents[LmEvalDocument], requests: Sequence[Request], results: Sequence[Response]
    ) -> Metrics:
        with prefixed(f"task {self.name}"):
            return self._metrics(documents.evaluated, self._responses(documents, requests, results), len(requests))

    def _metrics(
        self, documents: Sequence[LmEvalDocument], responses: Sequence[list[Response]], requests: int
    ) -> Metrics:
        from llmtrain.eval.lm_eval.scores import aggregate, metrics, weighted_sum

        task = self.harness
        if "acc_mutual_info" in task.aggregation() and responses:
            asked_alone = len(responses[0]) > len(task.doc_to_choice(documents[0].record))
            task = task if asked_alone else task.without_mutual_information()
        values: dict[str, list[Any]] = {}
        hits: list[dict[str, WeightedSum]] = [{} for _ in documents]
        details: list[dict[str, Any]] = []
        for document, some in zip(documents, responses, strict=True):
            with prefixed(document.where, Exception):
                details.append(_details(document, some))
        instances = self._filtered(task, documents, responses)
        for chain in self.settings.chains:
            for number, document in enumerate(documents):
                for name, value in self._values(task, document, instances[number], chain).items():
                    values.setdefault(_title(name, chain), []).append(value)
                    function = task.aggregation().get(name, metrics.mean)
                    with prefixed(document.where, Exception):
                        if (share := weighted_sum(function, value)) is not None:
                            hits[number][_title(name, chain)] = share
                if self.settings.generation is not None:
                    answer = instances[number][0].filtered_resps[chain]
                    kept = answer if isinstance(answer, str | int | float | None) else str(answer)
                    details[number].setdefault("filtered", {})[chain] = kept
        for detail, hit in zip(details, hits, strict=True):
            detail["metrics"] = {title: value for title, (value, _) in hit.items()}
        names = {title: title.partition(",")[0] for title in values}
        functions = {title: task.aggregation().get(name, metrics.mean) for title, name in names.items()}
        made = {title: aggregate(title, functions[title], items) for title, items in values.items()}
        headline = next((title for title in self.measured() if title in made), next(iter(made), None))
        if headline is None:
            raise EvalError("process_results gave no metric for any document")
        per_document = [
            DocumentMetrics(document.index, None, hit, detail, sum(one.truncated > 0 for one in some))
            for document, hit, detail, some in zip(documents, hits, details, responses, strict=True)
        ]
        truncated = sum(one.truncated for one in per_document)
        rising = task.higher_is_better()
        falling = [title for title, name in names.items() if not (rising.get(name, True) or is_perplexity(title))]
        return Metrics(
            headline, made, len(documents), requests, truncated, per_document=per_document, lower_is_better=falling
        )

    def _filtered(
        self, task: HarnessTask, documents: Sequence[LmEvalDocument], responses: Sequence[list[Response]]
    ) -> list[list[Any]]:
        """lm_eval's instances of each document, with their filtered responses by chain."""
        from lm_eval.api.instance import Instance

        made: list[list[Instance]] = []
        for document, some in zip(documents, responses, strict=True):
            about = (self.name, document.index, self.settings.repeats)
            answers = self._answers(some)
            made.append(
                [Instance("loglikelihood", document.record, (), n, about, one) for n, one in enumerate(answers)]
            )
        flat = [one for group in made for one in group]
        seconds = _FILTER_SECONDS + _ANSWER_SECONDS * len(flat)
        with self._limit(seconds, "filter_list: a filter"):
            task.filtered(flat)
        return made

    def _limit(self, seconds: float, what: str) -> AbstractContextManager[None]:
        """`time_limit`, except around a task's own code."""
        return nullcontext() if self.settings.own_scoring else time_limit(seconds, what)

    def _values(self, task: HarnessTask, document: LmEvalDocument, instances: list[Any], chain: str) -> dict[str, Any]:
        """Values of a document by metric."""
        with prefixed(document.where, Exception), self._limit(_FILTER_SECONDS, "metric_list: a metric"):
            return task.process_results(document.record, [one.filtered_resps[chain] for one in instances])

    def _answers(self, responses: Sequence[Response]) -> list[list[Any]]:
        """Responses of a document's instances, each a list of its repeats."""
        if self.settings.generation is not None:
            stops = self.settings.generation.stops
            texts = [until_stop(one.text, stops) for one in responses if isinstance(one, GeneratedText)]
            return [texts * (self.settings.repeats // len(texts))]
        pairs = [(one.log_likelihood, one.greedy) for one in responses if isinstance(one, Loglikelihood)]
        return [[sum(value for value, _ in pairs)]] if self.rolling else [[pair] for pair in pairs]


def _title(name: str, chain: str) -> str:
    return name if chain == "none" else f"{name},{chain}"


def _details(document: LmEvalDocument, responses: Sequence[Response]) -> dict[str, Any]:
    texts = document.texts
    details: dict[str, Any] = {"document": document.index, "where": document.where, **describe(texts)}
    likelihoods = [one for one in responses if isinstance(one, Loglikelihood)]
    if likelihoods:
        details["log_likelihoods"] = [one.log_likelihood for one in likelihoods]
        details["tokens"] = [one.tokens for one in likelihoods]
        details["greedy"] = [one.greedy for one in likelihoods]
        if document.task.OUTPUT_TYPE == "multiple_choice":
            details["chosen"] = _chosen(texts["choices"], details["log_likelihoods"])
    elif isinstance(responses[0], GeneratedText):
        details["text"] = responses[0].text
        if len(responses) > 1:
            details["texts"] = [one.text for one in responses if isinstance(one, GeneratedText)]
    return details


def _chosen(choices: Sequence[str], likelihoods: Sequence[float]) -> dict[str, int]:
    """Numbers of the choices that are answers by acc, acc_norm, acc_bytes and acc_mutual_info, for people to read."""
    conditional, alone = likelihoods[: len(choices)], likelihoods[len(choices) :]
    scores = {"acc": conditional}
    for name, sizes in (("norm", map(len, choices)), ("bytes", (len(one.encode()) for one in choices))):
        scores[name] = [value / max(size, 1) for value, size in zip(conditional, sizes, strict=True)]
    if alone:
        scores["mutual_info"] = [value - other for value, other in zip(conditional, alone, strict=True)]
    return {name: max(range(len(some)), key=some.__getitem__) for name, some in scores.items()}
