"""The YAML of a task. Nothing here reads data, and nothing imports torch."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.base import Problem
from llmtrain.eval.tasks.sections import FoundryPrompting, LmEvalPrompting, Shots, Source, Templates, template_problems

Convention = Literal["foundry", "lm-eval"]
CONVENTIONS: tuple[Convention, ...] = ("foundry", "lm-eval")

TaskType = Literal["multiple_choice", "schema", "language_modeling", "perplexity", "generation", "instructions"]

TEMPLATES: dict[str, dict[str, str | None]] = {
    "multiple_choice": {"query": "{{query}}", "choices": "{{choices}}", "gold": "{{gold}}"},
    "schema": {"contexts": "{{context_options}}", "continuation": "{{continuation}}", "gold": "{{gold}}"},
    "language_modeling": {"context": "{{context}}", "continuation": "{{continuation}}"},
    "perplexity": {"text": "{{text}}", "original": None},
    "generation": {
        "context": "{{context}}",
        "answer": "{{answer}}",
        "aliases": "{{aliases | default([])}}",
        "chain_of_thought": "{{chain_of_thought | default(none)}}",
        "choices": None,
    },
    "instructions": {"context": "{{prompt}}", "instructions": "{{instruction_id_list}}", "arguments": "{{kwargs}}"},
}
"""Templates of each type of task with their defaults, which are LLM Foundry's field names; of instructions, IFEval's."""

METRICS: dict[str, tuple[str, ...]] = {
    "multiple_choice": ("acc_sum", "acc_per_token", "acc_per_char", "acc_per_byte", "acc_pmi"),
    "schema": ("acc_sum", "acc_per_token", "acc_per_char", "acc_per_byte"),
    "language_modeling": ("acc", "perplexity", "token_perplexity"),
    "perplexity": ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generation": ("exact_match",),
    "instructions": (
        *("prompt_level_strict_acc", "inst_level_strict_acc"),
        *("prompt_level_loose_acc", "inst_level_loose_acc"),
    ),
}
"""Metrics of each type of task. lm-evaluation-harness calls the sum, per-character, per-byte and PMI accuracies acc,
acc_norm, acc_bytes and acc_mutual_info."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

_ANSWER_SETTINGS = ("stops", "max_new_tokens")
_GENERATION_ONLY = ("cot_delimiter", "normalize", "extract", "ignore", "ignore_case", "ignore_punctuation")
"""Settings of the conventions' sections that have an effect on tasks with generated answers, and of type generation only."""

WITHOUT_EXAMPLES: dict[TaskType, str] = {
    "perplexity": "the perplexity of a text",
    "instructions": "a task of instructions",
}
"""Types of task without few-shot examples, in words."""

_HEADLINES: dict[str, dict[str, str]] = {
    "foundry": {"multiple_choice": "acc_per_token", "schema": "acc_per_token", "perplexity": "token_perplexity"},
    "lm-eval": {"multiple_choice": "acc_sum", "schema": "acc_sum", "perplexity": "word_perplexity"},
}


class TaskConfig(Templates):
    """A task: the source of its records, the templates of a document, and settings that differ between conventions."""

    name: str
    """Name in results and gauntlets."""
    type: TaskType
    """Type of the task, which determines requests, templates and metrics."""
    about: str = ""
    """One line for people."""
    source: Source
    """Source of the records."""
    local: Source | None = None
    """Used in place of `source` when a data folder is given (--data-dir); its path is relative to that folder."""
    category: str | None = None
    """Template: documents of one category are a data set of their own, with their own few-shot examples. foundry
    averages over categories, lm-eval over documents."""
    labels: list[str] | None = None
    """Names of the alternatives in `gold`, in order: [A, B, C, D]."""
    pmi: str | None = None
    """multiple_choice: the premise of PMI scores, log p(choice | query) - log p(choice | premise), such as "Answer:"
    (Holtzman et al. 2021, arXiv:2104.08315). Empty: nothing but the token that begins a document."""
    shots: Shots = [0]
    """Numbers of few-shot examples with which the task runs."""
    foundry: FoundryPrompting = FoundryPrompting()
    """Settings of LLM Foundry's convention."""
    lm_eval: LmEvalPrompting = LmEvalPrompting()
    """Settings of lm-evaluation-harness's convention."""
    conventions: Annotated[list[Convention], Field(min_length=1)] = list(CONVENTIONS)
    """Conventions that have the task; another one is refused."""

    @property
    def generates(self) -> bool:
        """True if the model is asked for text, not for log-likelihoods."""
        return self.type in ("generation", "instructions")

    def section(self, convention: Convention) -> FoundryPrompting | LmEvalPrompting:
        return self.foundry if convention == "foundry" else self.lm_eval

    def metrics(self, convention: Convention) -> tuple[str, ...]:
        """Names of all metrics of the task, the headline first."""
        names = METRICS[self.type]
        if self.pmi is None:
            names = tuple(name for name in names if name != "acc_pmi")
        if self.type == "generation" and convention == "lm-eval" and self.lm_eval.extract:
            names = tuple(self.lm_eval.extract)
        headline = self.section(convention).metric or _HEADLINES[convention].get(self.type, names[0])
        return (headline, *(name for name in names if name != headline))

    def problems(self) -> Iterator[Problem]:
        yield from Templates.problems(self)
        if not _NAME.fullmatch(self.name):
            yield self.problem_at(
                "name", "expected letters, digits, '_', '-' and '.', because files are named after it"
            )
        for name in ("category", "pmi"):
            yield from template_problems(name, getattr(self, name) or "")
        yield from self._templates_of_other_types("", self)
        for convention in CONVENTIONS:
            name = convention.replace("-", "_")
            section = self.section(convention)
            yield from self._templates_of_other_types(f"{name}.", section)
            unused = () if self.generates else _ANSWER_SETTINGS
            for key in unused if self.type == "generation" else (*unused, *_GENERATION_ONLY):
                if (
                    key in type(section).model_fields
                    and getattr(section, key) != type(section).model_fields[key].default
                ):
                    yield Problem(f"{name}.{key}", None, f"has no effect on a task of type {self.type}; remove it")
            if section.few_shot_from == "few_shot" and not any(
                one and one.few_shot for one in (self.source, self.local)
            ):
                yield Problem(
                    f"{name}.few_shot_from", "few_shot", "no source says where examples are; give source.few_shot"
                )
            metric, *known = self.metrics(convention)
            allowed = (
                set(known) | set(METRICS[self.type]) - {"acc_pmi"} | ({"acc_pmi"} if self.pmi is not None else set())
            )
            if self.type == "generation" and convention == "lm-eval" and self.lm_eval.extract:
                allowed = set(self.lm_eval.extract)
            if metric not in allowed:
                yield Problem(f"{name}.metric", metric, f"expected one of {', '.join(sorted(allowed))}")
        for name, chain in self.lm_eval.extract.items():
            path = f"lm_eval.extract.{name}"
            if self.category is None and any(step.categories is not None for step in chain):
                yield Problem(path, None, "a filter is for some categories, but the task has no category")
            wanting = [step.type for step in chain if step.type in ("multi_choice_regex", "word_order")]
            if wanting and not (self.choices or self.lm_eval.choices):
                yield Problem(path, None, f"{wanting[0]} looks for choices, but the task has no choices")
        if self.type == "instructions" and "foundry" in self.conventions:
            yield Problem("conventions", None, "LLM Foundry checks no instructions; write conventions: [lm-eval]")
        if self.source.text is not None and self.type != "perplexity":
            yield self.problem_at("source.text", f"a text file is for type perplexity, not {self.type}")
        if self.local and self.local.path is None and self.local.mds is None and self.local.text is None:
            yield Problem("local.path", None, "local is a file or folder below --data-dir: give path, mds or text")
        if self.pmi is not None and self.type != "multiple_choice":
            yield self.problem_at("pmi", f"PMI scores are for type multiple_choice, not {self.type}")
        if self.labels and self.type not in ("multiple_choice", "schema"):
            yield Problem("labels", None, f"labels are for types multiple_choice and schema, not {self.type}")
        if len(set(self.labels or ())) < len(self.labels or ()):
            yield self.problem_at("labels", "a label is there twice; each names one alternative")
        shots = [*self.shots, *(self.foundry.shots or []), *(self.lm_eval.shots or [])]
        if self.type in WITHOUT_EXAMPLES and any(shots):
            message = f"{WITHOUT_EXAMPLES[self.type]} has no few-shot examples; leave shots out"
            yield self.problem_at("shots", message)

    def _templates_of_other_types(self, prefix: str, section: Templates) -> Iterator[Problem]:
        known = TEMPLATES[self.type]
        for name, _ in section.templates():
            if name not in known and name != "preamble":
                yield Problem(prefix + name, None, f"not of a task of type {self.type}, which has {', '.join(known)}")
