"""A task: its documents, their requests, and metrics from the responses.

    task = load_task("arc_challenge", "lm-eval")
    documents = task.documents()
    requests = task.requests(documents, tokenizer, shots=5)
    metrics = task.metrics(documents, requests, results)      # results[i] is the response to requests[i]

Imports no torch: models are in scoring/.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.eval.errors import BadDocuments, EvalError, prefixed
from llmtrain.eval.prompts.chat import PLAIN, PromptStyle
from llmtrain.eval.prompts.encode import rolling_requests
from llmtrain.eval.prompts.requests import GenerateUntilRequest, LoglikelihoodRequest, Request, Response
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.report.metrics import Metrics
from llmtrain.eval.scoring.overlap import Steps, run_steps

D = TypeVar("D")


@dataclass(frozen=True)
class Documents(Generic[D]):
    """Documents of a task.

    evaluated: those to be scored. everything: all of the source; foundry draws examples from them and derives limits of generated
    answers. examples: those of source.few_shot, if examples come from there. skipped: reasons of records that were left out, by
    location.
    """

    evaluated: list[D]
    everything: list[D]
    examples: list[D] | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.evaluated)


@dataclass(frozen=True)
class Prompting:
    """Making of a task's prompts. shots: few-shot examples. pmi: False leaves out the requests of PMI scores. style: plain text or
    a chat template. bad: takes the reasons of documents without requests. whole: False cuts prompts short."""

    shots: int
    tokenizer: PromptTokenizer
    pmi: bool
    style: PromptStyle
    bad: dict[int, str]
    whole: bool = True


class Task(ABC):
    """All that an evaluation asks of a task. A document has `index` (its number in requests), `where` (file and line) and `text`
    (it with its right answer, for decontamination)."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in results."""

    @property
    @abstractmethod
    def shots(self) -> list[int]:
        """Numbers of few-shot examples with which the task is to run."""

    @property
    @abstractmethod
    def without_examples(self) -> str | None:
        """Words for the task, if it has no few-shot examples; otherwise None."""

    @property
    @abstractmethod
    def rolling(self) -> bool:
        """True if whole texts are scored, in windows; no chat template frames them."""

    @abstractmethod
    def measured(self, pmi: bool = True) -> list[str]:
        """Names of the metrics, the headline first. pmi: False leaves out those of PMI scores."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Settings for results.json on which prompts and scores depend, but for data and shots: comparisons name what differs."""

    @abstractmethod
    def window(self, max_seq_len: int) -> int:
        """Most tokens of context and continuation together, for a model that reads max_seq_len."""

    @abstractmethod
    def documents(self, limit: int | None = None) -> Documents[Any]:
        """Read the source. limit: number of documents to evaluate (of each category), the first ones.

        Raises BadDocuments, with the other documents, for records of which the task can make none; EvalError for a source that
        cannot be read.
        """

    def check_shots(self, documents: Documents[Any], shots: int) -> None:
        """Check the number of few-shot examples; raises EvalError where there are fewer."""
        if shots and self.without_examples:
            raise EvalError(f"task {self.name}: {self.without_examples} has no few-shot examples")
        self._check_pools(documents, shots)

    @abstractmethod
    def _check_pools(self, documents: Documents[Any], shots: int) -> None:
        """Check that there are so many examples."""

    @abstractmethod
    def _batches(self, documents: Documents[Any], how: Prompting) -> Iterator[list[Request]]:
        """Requests, some hundred at a time. Not called for tasks with `rolling`."""

    @staticmethod
    def _responses(
        documents: Documents[Any], requests: Sequence[Request], results: Sequence[Response]
    ) -> list[list[Response]]:
        """Responses to the requests of each evaluated document, by their options."""
        answers: dict[int, list[tuple[int, Response]]] = {one.index: [] for one in documents.evaluated}
        for request, result in zip(requests, results, strict=True):
            option = request.option if isinstance(request, LoglikelihoodRequest) else 0
            answers[request.document].append((option, result))
        return [[one for _, one in sorted(some, key=lambda pair: pair[0])] for some in answers.values()]

    @abstractmethod
    def metrics(self, documents: Documents[Any], requests: Sequence[Request], results: Sequence[Response]) -> Metrics:
        """Metrics of the task. results[i] is the response to requests[i]; every document counts once."""

    @property
    def metric(self) -> str:
        """Name of the headline metric."""
        return self.measured()[0]

    def requests(
        self, documents: Documents[Any], tokenizer: TextTokenizer, shots: int | None = None, **options: Any
    ) -> list[Request]:
        """Requests to a model, document by document: those of `request_steps`."""
        return run_steps(self.request_steps(documents, tokenizer, shots, **options))

    def request_steps(
        self,
        documents: Documents[Any],
        tokenizer: TextTokenizer,
        shots: int | None = None,
        *,
        max_seq_len: int | None = None,
        pmi: bool = True,
        style: PromptStyle = PLAIN,
    ) -> Steps[list[Request]]:
        """Requests to a model, document by document, computed in steps of some hundred prompts.

        shots: few-shot examples (default: the first of the task's). max_seq_len: tokens that the model reads, needed for
        perplexities of whole texts only. pmi: False leaves out the requests of PMI scores. style: plain text or a chat template.
        Raises EvalError for too few examples; BadDocuments, with the requests of the others, for documents with an empty prompt
        or a continuation without tokens.
        """
        shots = self.shots[0] if shots is None else shots
        self.check_shots(documents, shots)
        encoder = PromptTokenizer(tokenizer)
        made: list[Request] = []
        bad: dict[int, str] = {}
        if self.rolling:
            if max_seq_len is None:
                raise EvalError(f"task {self.name}: the perplexity of a text needs the model's max_seq_len")
            made = list(rolling_requests(documents.evaluated, encoder, max_seq_len, bad))
            return self._usable(documents, made, bad)
        for some in self._named_batches(documents, Prompting(shots, encoder, pmi, style, bad)):
            made += some
            yield
        return self._usable(documents, made, bad)

    def check(
        self,
        documents: Documents[Any],
        tokenizer: TextTokenizer,
        shots: int,
        *,
        max_seq_len: int,
        pmi: bool = True,
        style: PromptStyle = PLAIN,
    ) -> None:
        """Check of all prompts, of which only the ends are tokenised. max_seq_len: tokens that the model reads.

        Raises what `requests` and `check_lengths` would, but for prompts whose whole text changes the tokens of their ends.
        """
        self.check_shots(documents, shots)
        bad: dict[int, str] = {}
        if not self.rolling:
            how = Prompting(shots, PromptTokenizer(tokenizer), pmi, style, bad, whole=False)
            for some in self._named_batches(documents, how):
                self._check_lengths(some, max_seq_len, bad)
        self._usable(documents, [], bad)

    def _named_batches(self, documents: Documents[Any], how: Prompting) -> Iterator[list[Request]]:
        """`_batches`, of which errors name the task."""
        with prefixed(f"task {self.name}"):
            yield from self._batches(documents, how)

    def _usable(self, documents: Documents[Any], requests: list[Request], bad: Mapping[int, str]) -> list[Request]:
        """Requests, if no document is bad. bad: reasons by index. Raises BadDocuments with the requests of the other documents."""
        if not bad:
            return requests
        reasons = {one.where: bad[one.index] for one in documents.evaluated if one.index in bad}
        raise BadDocuments(self.name, reasons, [one for one in requests if one.document not in bad])

    def check_lengths(self, documents: Documents[Any], requests: list[Request], max_seq_len: int) -> None:
        """Check that every continuation leaves room for some context.

        max_seq_len: tokens that the model reads. Raises BadDocuments, with the requests of the others, for documents with a longer
        continuation; EvalError for answers that may be longer.
        """
        bad: dict[int, str] = {}
        self._check_lengths(requests, max_seq_len, bad)
        self._usable(documents, requests, bad)

    def _check_lengths(self, requests: Sequence[Request], max_seq_len: int, bad: dict[int, str]) -> None:
        most = self.window(max_seq_len) - 1
        reads = f"the model reads {max_seq_len} tokens, and"
        advice = "raise max_length if the model can read more"
        for request in requests:
            if isinstance(request, LoglikelihoodRequest) and len(request.continuation) > most:
                what = f"a continuation of {len(request.continuation)} tokens does not fit (at most {most} of them)"
                bad[request.document] = f"{reads} {what}; leave the document out, or {advice}"
            elif isinstance(request, GenerateUntilRequest) and request.max_new_tokens >= max_seq_len:
                what = f"an answer of up to {request.max_new_tokens} tokens does not fit (at most {max_seq_len - 1} of them"
                raise EvalError(f"task {self.name}: {reads} {what} after a context); lower max_new_tokens, or {advice}")
