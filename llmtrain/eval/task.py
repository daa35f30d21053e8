"""A task under one convention: its documents, the requests they make of a model, and what the answers amount to.

    task = load_task("arc_challenge", "lm-eval")
    documents = task.documents()
    requests = task.requests(documents, tokenizer, shots=5)
    metrics = task.metrics(documents, requests, results)      # results[i] answers requests[i]

The model in between is not this package's business: nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llmtrain.data.tokenizer import TextTokenizer
from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts import foundry, lm_eval
from llmtrain.eval.prompts.encode import encode
from llmtrain.eval.prompts.few_shot import check_pool
from llmtrain.eval.prompts.foundry import FoundryWriter
from llmtrain.eval.prompts.lm_eval import LmEvalWriter
from llmtrain.eval.prompts.rolling_loglikelihood import rolling_requests
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.report.judge import Style, judge
from llmtrain.eval.report.metrics import Metrics, collect
from llmtrain.eval.scoring.overlap import Steps, finished
from llmtrain.eval.scoring.request import Generate, Generated, Score, Scored
from llmtrain.eval.tasks.config import CONVENTIONS, Convention, TaskConfig, TaskType
from llmtrain.eval.tasks.documents import Choices, Continuation, Document, Question, Recipe, Schema, Text
from llmtrain.eval.tasks.load import find_yaml, known, read_section
from llmtrain.eval.tasks.sections import LmEvalPrompting, Source
from llmtrain.eval.tasks.sources import Record, read_records


@dataclass(frozen=True)
class Documents:
    """evaluated: those to be scored. everything: all of the source, of which foundry draws examples and limits.

    examples: those of a source of their own, if examples come from there.
    """

    evaluated: list[Document]
    everything: list[Document]
    examples: list[Document] | None = None

    def __len__(self) -> int:
        return len(self.evaluated)


@dataclass(frozen=True)
class Task:
    """base: folder at which the source's relative paths begin."""

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
    def metric(self) -> str:
        """The headline."""
        return self.config.metrics(self.convention)[0]

    @property
    def shots(self) -> list[int]:
        """Numbers of few-shot examples with which the task is to run."""
        return self.style.shots or self.config.shots

    @cached_property
    def style(self) -> Style:
        return self.config.section(self.convention)

    @property
    def _plain_continuation(self) -> bool:
        """Whether nobody wrote a template for it."""
        return self.style.continuation is None and self.config.continuation is None

    def window(self, max_seq_len: int) -> int:
        """Most tokens of context and continuation together, for a model that reads max_seq_len.

        The last token of a continuation is only predicted; lm-evaluation-harness makes use of that, LLM Foundry does not.
        """
        return max_seq_len + (self.convention == "lm-eval")

    def documents(self, limit: int | None = None) -> Documents:
        """Reads the source. limit: evaluate the first so many documents (of each category).

        Raises EvalError with file and line for a record of which the task's templates cannot make a document.
        """
        recipe = Recipe(self.config, self.source, self.convention)
        everything = [recipe.document(record, index) for index, record in enumerate(self._records())]
        if not everything:
            raise EvalError(f"task {self.name}: its source holds no documents")
        examples = None
        if self._examples_apart():
            examples = [recipe.document(record, index) for index, record in enumerate(self._records(few_shot=True))]
        evaluated = [one for group in by_category(everything).values() for one in group[:limit]]
        return Documents(evaluated, everything, examples)

    def _records(self, few_shot: bool = False) -> Iterator[Record]:
        try:
            yield from read_records(self.source, self.base, few_shot=few_shot)
        except EvalError as error:
            raise EvalError(f"task {self.name}: {error}") from None

    def _examples_apart(self) -> bool:
        wanted = self.style.few_shot_from or ("documents" if self.convention == "foundry" else "few_shot")
        return wanted == "few_shot" and self.source.few_shot is not None

    def requests(
        self,
        documents: Documents,
        tokenizer: TextTokenizer,
        shots: int | None = None,
        *,
        max_seq_len: int | None = None,
        pmi: bool = True,
    ) -> list[Score | Generate]:
        """What to ask of a model, document by document.

        shots: few-shot examples (default: the first of the task's). max_seq_len: tokens that the model reads; only type
        perplexity needs it, whose windows depend on it. pmi: False leaves out the requests of PMI scores. Raises
        EvalError for too few examples, an empty prompt or a continuation without tokens.
        """
        return finished(self.request_steps(documents, tokenizer, shots, max_seq_len=max_seq_len, pmi=pmi))

    def request_steps(
        self,
        documents: Documents,
        tokenizer: TextTokenizer,
        shots: int | None = None,
        *,
        max_seq_len: int | None = None,
        pmi: bool = True,
    ) -> Steps[list[Score | Generate]]:
        """`requests`, some prompts at a time."""
        shots = self.shots[0] if shots is None else shots
        self.check_shots(documents, shots)
        encoder = PromptTokenizer(tokenizer)
        if self.type == "perplexity":
            if max_seq_len is None:
                raise EvalError(f"task {self.name}: the perplexity of a text needs the model's max_seq_len")
            return list(rolling_requests(documents.evaluated, encoder, max_seq_len))
        made: list[Score | Generate] = []
        own, everything = documents.examples is None, by_category(documents.everything)
        for category, group, pool in self._pools(documents):
            for some in self._category(group, everything[category], pool, own, shots, encoder, pmi):
                made += some
                yield
        return made

    def check_shots(self, documents: Documents, shots: int) -> None:
        """Raises EvalError for more few-shot examples than there are."""
        if shots and self.type == "perplexity":
            raise EvalError(f"task {self.name}: the perplexity of a text has no few-shot examples")
        own = documents.examples is None
        one_more = LmEvalWriter(self.style).avoids(own) if isinstance(self.style, LmEvalPrompting) else own
        for category, _, pool in self._pools(documents) if shots else ():
            check_pool(self.name, len(pool), shots, one_more, category)

    def _pools(self, documents: Documents) -> Iterator[tuple[str | None, list[Document], list[Document]]]:
        """(category, its documents, where its examples come from)."""
        pools = by_category(documents.everything if documents.examples is None else documents.examples)
        for category, group in by_category(documents.evaluated).items():
            yield category, group, pools.get(category, [])

    def _category(
        self,
        group: list[Document],
        everything: list[Document],
        pool: list[Document],
        own: bool,
        shots: int,
        tokenizer: PromptTokenizer,
        pmi: bool,
    ) -> Iterator[list[Score | Generate]]:
        if isinstance(self.style, LmEvalPrompting):
            writer, encoding = LmEvalWriter(self.style, self._plain_continuation), lm_eval.ENCODING
        else:
            writer, encoding = FoundryWriter(self.style, tokenizer), foundry.ENCODING
        generation = writer.generation(everything, tokenizer) if self.type == "generation" else None
        prompts = (one for one in writer.prompts(group, pool, shots, own) if pmi or not one.premise)
        return encode(prompts, encoding, tokenizer, generation)

    def check_fit(self, documents: Documents, requests: Sequence[Score | Generate], max_seq_len: int) -> None:
        """max_seq_len: tokens that the model reads. Raises EvalError, with file and line, for what no context can precede."""
        most = self.window(max_seq_len) - 1
        for request in requests:
            if isinstance(request, Score) and len(request.continuation) > most:
                what = f"a continuation of {len(request.continuation)} tokens"
                room, advice = f"{most} of them", "leave the document out"
            elif isinstance(request, Generate) and request.max_new_tokens >= max_seq_len:
                what = f"an answer of up to {request.max_new_tokens} tokens"
                room, advice = f"{max_seq_len - 1} of them after a context", "lower max_new_tokens"
            else:
                continue
            where = next(one.where for one in documents.evaluated if one.index == request.document)
            raise EvalError(
                f"task {self.name}: {where}: the model reads {max_seq_len} tokens, and {what} does not fit (at most {room}); "
                f"{advice}, or raise max_length if the model can read more"
            )

    def metrics(
        self,
        documents: Documents,
        requests: Sequence[Score | Generate],
        results: Sequence[Scored | Generated],
    ) -> Metrics:
        """results[i] answers requests[i]. Every document counts once."""
        answers: dict[int, list[tuple[int, Scored | Generated]]] = {one.index: [] for one in documents.evaluated}
        for request, result in zip(requests, results, strict=True):
            answers[request.document].append((request.option if isinstance(request, Score) else 0, result))
        judged = []
        for document in documents.evaluated:
            options = sorted(answers[document.index], key=lambda pair: pair[0])
            assert [option for option, _ in options] == list(range(len(options))), f"{document.where}: {options}"
            judged.append(judge(document, [result for _, result in options], self.style))  # type: ignore[arg-type]
        names = [name for name in self.config.metrics(self.convention) if all(name in one.values for one in judged)]
        values, categories = collect(judged, names, macro=self.convention == "foundry")
        truncated = sum(one.truncated for one in judged)
        return Metrics(self.metric, values, len(judged), len(requests), truncated, categories, judged)


def load_task(name: str | Path, convention: str, data_dir: str | Path | None = None) -> Task:
    """A task from its YAML (a path, or the name of a shipped one) under a convention, `foundry` or `lm-eval`.

    data_dir: a folder of local files that takes the place of the task's source (its `local`).
    Raises ConfigError that holds everything wrong with the YAML, or EvalError.
    """
    known(convention, CONVENTIONS, "convention")
    file = find_yaml(name, "tasks")
    config = read_section(file, TaskConfig)
    if data_dir is None:
        return Task(config, convention, config.source, file.parent)  # type: ignore[arg-type]
    if config.local is None:
        if config.source.hub is not None:
            raise EvalError(
                f"{file}: a data folder is given, but the task has no `local` that says what to look for there"
            )
        return Task(config, convention, config.source, file.parent)  # type: ignore[arg-type]
    return Task(config, convention, config.local, Path(data_dir).expanduser())  # type: ignore[arg-type]


def document_text(document: Document) -> str:
    """The document with its right answer as plain text, without examples or delimiters of a convention."""
    match content := document.content:
        case Choices():
            return _joined(content.query, content.choices[content.gold])
        case Schema():
            return _joined(content.contexts[content.gold], content.continuation)
        case Continuation():
            return _joined(content.context, content.continuation)
        case Question():
            return _joined(content.context, content.answer)
        case Text():
            return content.text


def _joined(before: str, answer: str) -> str:
    """By one space, as in running text; by none before a mark."""
    answer = answer.strip()
    return before.rstrip() + " " * (answer[:1] not in (*".,;:!?", "")) + answer


def by_category(documents: Sequence[Document]) -> dict[str | None, list[Document]]:
    """Categories in alphabetical order; one group where the task has none."""
    groups: dict[str | None, list[Document]] = {}
    for document in documents:
        groups.setdefault(document.category, []).append(document)
    return {name: groups[name] for name in sorted(groups, key=lambda name: name or "")}
