"""The YAML of a task. Nothing here reads data, and nothing imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from llmtrain.config.base import PositiveInt, Problem, Section
from llmtrain.eval.errors import EvalError
from llmtrain.eval.templates import Template

Convention = Literal["foundry", "lm-eval"]
CONVENTIONS: tuple[Convention, ...] = ("foundry", "lm-eval")

TaskType = Literal["multiple_choice", "schema", "language_modeling", "perplexity", "generation"]

TEMPLATES: dict[str, dict[str, str | None]] = {
    "multiple_choice": {"query": "{{query}}", "choices": "{{choices}}", "gold": "{{gold}}"},
    "schema": {"contexts": "{{context_options}}", "continuation": "{{continuation}}", "gold": "{{gold}}"},
    "language_modeling": {"context": "{{context}}", "continuation": "{{continuation}}"},
    "perplexity": {"text": "{{text}}"},
    "generation": {
        "context": "{{context}}",
        "answer": "{{answer}}",
        "aliases": "{{aliases | default([])}}",
        "chain_of_thought": None,
    },
}
"""The templates of each type of task and their defaults, which are LLM Foundry's field names."""

METRICS: dict[str, tuple[str, ...]] = {
    "multiple_choice": ("acc_sum", "acc_per_token", "acc_per_char", "acc_per_byte", "acc_pmi"),
    "schema": ("acc_sum", "acc_per_token", "acc_per_char", "acc_per_byte"),
    "language_modeling": ("acc", "perplexity", "token_perplexity"),
    "perplexity": ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generation": ("exact_match",),
}
"""What each type of task measures; lm-evaluation-harness says acc, acc_norm, acc_bytes, acc_mutual_info for the sum,
per-character, per-byte and PMI accuracies."""

_HEADLINES: dict[str, dict[str, str]] = {
    "foundry": {"multiple_choice": "acc_per_token", "schema": "acc_per_token", "perplexity": "token_perplexity"},
    "lm-eval": {"multiple_choice": "acc_sum", "schema": "acc_sum", "perplexity": "word_perplexity"},
}

ListOfTemplates = Annotated[
    list[str],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""One template or several; one that gives a list counts as all its entries."""


class Examples(Section):
    """Where few-shot examples come from, in place of the evaluated documents. The source's other settings hold."""

    path: str | None = None
    """A JSONL file."""
    split: str | None = None
    """Another split of the hub data set."""
    mds: str | None = None
    """A folder of MDS shards."""


class Source(Section):
    """Where the records are: one of path, hub, mds or text. Relative paths begin at the task's YAML."""

    path: str | None = None
    """A JSONL file; .gz and .zst too."""
    hub: str | None = None
    """A data set on the Hugging Face hub, by name; needs the `datasets` library."""
    config: str | None = None
    """Configuration of the hub data set."""
    split: str | None = None
    """Split of the hub data set."""
    mds: str | None = None
    """A folder of MDS shards."""
    text: str | None = None
    """A text file; all of it is one document, with the field `text`."""
    fields: dict[str, str] = {}
    """New fields, made from each record by templates, in this order; later ones see earlier ones."""
    few_shot: Examples | None = None
    """Where few-shot examples come from; by default they are other documents of the same source."""

    def problems(self) -> Iterator[Problem]:
        given = [name for name in ("path", "hub", "mds", "text") if getattr(self, name) is not None]
        if not given:
            yield Problem("path", None, "a source needs path (a JSONL file), hub, mds or text")
        if len(given) > 1:
            yield Problem(given[1], getattr(self, given[1]), f"a source has one place; {given[0]} is given already")
        if self.hub and self.split is None:
            yield Problem("split", None, "missing; a hub data set needs its split, such as test or validation")
        for name in ("config", "split"):
            if not self.hub and getattr(self, name) is not None:
                yield Problem(name, getattr(self, name), "belongs to a hub data set; remove it")
        for name, template in self.fields.items():
            yield from _template_problems(f"fields.{name}", template)
        if self.few_shot:
            key = next((key for key in ("path", "mds", "hub") if getattr(self, key) is not None), "text")
            wanted = {"hub": "split"}.get(key, key)
            wrong = {name for name in ("path", "split", "mds") if getattr(self.few_shot, name) is not None} != {wanted}
            if key == "text" or wrong:
                text = "a text file has no examples" if key == "text" else f"this source needs `{wanted}` there"
                yield Problem("few_shot", None, f"{text}")


class Extract(Section):
    """Takes the answer out of what was generated: lm-evaluation-harness's `regex` filter."""

    pattern: str
    """A regular expression; its first group that is not empty, or the whole match if it has none, is the answer."""
    match: int = 0
    """Which of the matches: 0 is the first, -1 the last."""
    otherwise: str = "[invalid]"
    """The answer where nothing matches."""

    def problems(self) -> Iterator[Problem]:
        yield from _pattern_problems("pattern", self.pattern)


class Templates(Section):
    """How the parts of a document come from a record's fields. Which of them a task has depends on its type."""

    query: str | None = None
    """multiple_choice: what is asked."""
    choices: ListOfTemplates | None = None
    """multiple_choice: the alternatives: an expression that gives a list, or a list of texts."""
    gold: str | None = None
    """multiple_choice, schema: the right alternative: its number (from 0), its label, or its text."""
    contexts: ListOfTemplates | None = None
    """schema: the alternative contexts."""
    context: str | None = None
    """language_modeling, generation: what comes before."""
    continuation: str | None = None
    """language_modeling, schema: what is scored after the context."""
    answer: str | None = None
    """generation: the answer, also in few-shot examples."""
    aliases: ListOfTemplates | None = None
    """generation: further right answers."""
    chain_of_thought: str | None = None
    """generation, foundry: the reasoning that precedes the answer in examples."""
    text: str | None = None
    """perplexity: the text."""
    preamble: str | None = None
    """What comes once, before everything (LLM Foundry's prompt_string, lm-evaluation-harness's description)."""

    def templates(self) -> Iterator[tuple[str, list[str]]]:
        """(name, templates) of those that are given."""
        for name in Templates.model_fields:
            value = getattr(self, name)
            if value is not None:
                yield name, value if isinstance(value, list) else [value]

    def problems(self) -> Iterator[Problem]:
        for name, templates in self.templates():
            for template in templates:
                yield from _template_problems(name, template)


class Prompting(Templates):
    """What both conventions' sections may set; templates given here take the place of the task's."""

    metric: str | None = None
    """The headline metric."""
    shots: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    """Numbers of few-shot examples with which the task runs; default: the task's."""
    stops: list[str] = []
    """generation: texts that end the answer; the end-of-document token always does."""
    few_shot_from: Literal["documents", "few_shot"] | None = None
    """Take examples from the evaluated documents or from source.few_shot. Default: foundry takes documents; lm-eval
    takes source.few_shot where there is one."""

    def problems(self) -> Iterator[Problem]:
        yield from Templates.problems(self)
        if "" in self.stops:
            yield Problem("stops", "", "an empty text would end every answer at once")


class FoundryPrompting(Prompting):
    """LLM Foundry's convention."""

    prelimiter: str = ""
    """Before every query or context (`question_prelimiter` of LLM Foundry's task files)."""
    example_delimiter: str = "\n"
    """Between examples."""
    continuation_delimiter: str = " "
    """Between the query or context and the answer."""
    cot_delimiter: str = ""
    """generation: between chain_of_thought and answer; what follows it in a generated text is the answer."""
    strip: bool = True
    """Strip the fields of white space, and white space off the end of the prompt."""
    normalize: bool = True
    """generation: compare in lower case without articles and punctuation, as TriviaQA's own script does."""


class LmEvalPrompting(Prompting):
    """lm-evaluation-harness's convention (0.4.13)."""

    example_delimiter: str = "\n\n"
    """Between examples (fewshot_delimiter)."""
    continuation_delimiter: str = " "
    """Between the query or context and the answer (target_delimiter)."""
    sampler: Literal["default", "first_n"] = "default"
    """How examples are chosen: at random, or the first ones."""
    avoid_document: bool | None = None
    """Draw one example more and leave out the document itself. lm-evaluation-harness does so where fewshot_split and
    test_split are equal, also when a task names neither. Default: when examples are documents."""
    max_new_tokens: PositiveInt = 256
    """generation: at most so many tokens (max_gen_toks)."""
    strip: bool = False
    """generation: strip white space off what was generated (remove_whitespace)."""
    extract: dict[str, Extract] = {}
    """generation: ways to find the answer in what was generated; each makes a metric of its name."""
    ignore: list[str] = []
    """generation: regular expressions that are removed before comparing (regexes_to_ignore)."""
    ignore_case: bool = False
    """generation: compare in lower case."""
    ignore_punctuation: bool = False
    """generation: compare without punctuation."""

    def problems(self) -> Iterator[Problem]:
        yield from Prompting.problems(self)
        for pattern in self.ignore:
            yield from _pattern_problems("ignore", pattern)


class TaskConfig(Templates):
    """A task: where its records are, what a document is made of, and what differs between conventions."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """In results and gauntlets."""
    type: TaskType
    """What is asked of the model."""
    about: str = ""
    """One line for people."""
    source: Source
    """Where the records are."""
    local: Source | None = None
    """Used in place of `source` when a data folder is given (--data-dir); its path is relative to that folder."""
    category: str | None = None
    """Template: documents of one category are a data set of their own, with their own few-shot examples. foundry
    averages over categories, lm-eval over documents."""
    labels: list[str] | None = None
    """What `gold` calls the alternatives, in order: [A, B, C, D]."""
    pmi: str | None = None
    """multiple_choice: the premise of PMI scores, log p(choice | query) - log p(choice | premise), such as "Answer:"
    (Holtzman et al. 2021, arXiv:2104.08315). Empty: nothing but the token that begins a document."""
    shots: list[Annotated[int, Field(ge=0)]] = Field([0], min_length=1)
    """Numbers of few-shot examples with which the task runs."""
    foundry: FoundryPrompting = Field(default_factory=FoundryPrompting)
    """What LLM Foundry's convention needs."""
    lm_eval: LmEvalPrompting = Field(default_factory=LmEvalPrompting)
    """What lm-evaluation-harness's convention needs."""

    def section(self, convention: Convention) -> FoundryPrompting | LmEvalPrompting:
        return self.foundry if convention == "foundry" else self.lm_eval

    def metrics(self, convention: Convention) -> tuple[str, ...]:
        """All that the task measures, the headline first."""
        names = METRICS[self.type]
        if self.pmi is None:
            names = tuple(name for name in names if name != "acc_pmi")
        if self.type == "generation" and convention == "lm-eval" and self.lm_eval.extract:
            names = tuple(self.lm_eval.extract)
        headline = self.section(convention).metric or _HEADLINES[convention].get(self.type, names[0])
        return (headline, *(name for name in names if name != headline))

    def problems(self) -> Iterator[Problem]:
        yield from Templates.problems(self)
        for name in ("category", "pmi"):
            yield from _template_problems(name, getattr(self, name) or "")
        yield from self._of_another_type("", self)
        for convention in CONVENTIONS:
            name = convention.replace("-", "_")
            yield from self._of_another_type(f"{name}.", self.section(convention))
            metric, *known = self.metrics(convention)
            allowed = (
                set(known) | set(METRICS[self.type]) - {"acc_pmi"} | ({"acc_pmi"} if self.pmi is not None else set())
            )
            if self.type == "generation" and convention == "lm-eval" and self.lm_eval.extract:
                allowed = set(self.lm_eval.extract)
            if metric not in allowed:
                yield Problem(f"{name}.metric", metric, f"expected one of {', '.join(sorted(allowed))}")
        if self.source.text is not None and self.type != "perplexity":
            yield Problem("source.text", self.source.text, f"a text file is for type perplexity, not {self.type}")
        if self.local and self.local.path is None and self.local.mds is None and self.local.text is None:
            yield Problem("local.path", None, "local is a file or folder below --data-dir: give path, mds or text")
        if self.pmi is not None and self.type != "multiple_choice":
            yield Problem("pmi", self.pmi, f"PMI scores are for type multiple_choice, not {self.type}")
        if self.labels and self.type not in ("multiple_choice", "schema"):
            yield Problem("labels", None, f"labels are for types multiple_choice and schema, not {self.type}")
        shots = [*self.shots, *(self.foundry.shots or []), *(self.lm_eval.shots or [])]
        if self.type == "perplexity" and any(shots):
            yield Problem("shots", self.shots, "the perplexity of a text has no few-shot examples; leave shots out")

    def _of_another_type(self, prefix: str, section: Templates) -> Iterator[Problem]:
        known = TEMPLATES[self.type]
        for name, _ in section.templates():
            if name not in known and name != "preamble":
                yield Problem(prefix + name, None, f"not of a {self.type} task, which has {', '.join(known)}")


def _template_problems(path: str, template: str) -> Iterator[Problem]:
    try:
        Template(template)
    except EvalError as error:
        yield Problem(path, template, str(error))


def _pattern_problems(path: str, pattern: str) -> Iterator[Problem]:
    try:
        re.compile(pattern)
    except re.error as error:
        yield Problem(path, pattern, f"not a regular expression: {error}")


def task_schema() -> dict[str, Any]:
    """JSON schema by which editors complete and check a task's YAML."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **TaskConfig.model_json_schema()}
