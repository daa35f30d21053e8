"""Sections of a task's YAML: its source, its templates, and the settings of each convention."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.base import OrOne, PositiveInt, Problem, Section
from llmtrain.config.texts import PathText
from llmtrain.eval.errors import EvalError
from llmtrain.eval.tasks.filters import Chain, pattern_problems
from llmtrain.eval.tasks.templates import Template

Texts = Annotated[list[str], OrOne(str)]
"""One text or several. Of templates: one that gives a list stands for all its entries."""

Shots = Annotated[list[Annotated[int, Field(ge=0, le=1000)]], Field(min_length=1)]


class Examples(Section):
    """Source of few-shot examples, in place of the evaluated documents. The source's other settings hold."""

    path: PathText | None = None
    """A JSONL file."""
    split: str | None = None
    """Another split of the hub data set."""
    mds: PathText | None = None
    """A folder of MDS shards."""


class Source(Section):
    """Source of the records: one of path, hub, mds or text. Paths are relative to the task's YAML."""

    path: PathText | None = None
    """A JSONL file; .gz and .zst too."""
    hub: str | None = None
    """A data set on the Hugging Face hub, by name; needs the `datasets` library."""
    config: Texts | None = None
    """Configuration of the hub data set. Of several, one after another; each record's field `config` then says which."""
    split: str | None = None
    """Split of the hub data set."""
    mds: PathText | None = None
    """A folder of MDS shards."""
    text: PathText | None = None
    """A text file; all of it is one document, with the field `text`."""
    fields: dict[str, str] = {}
    """New fields, made from each record by templates, in this order; later ones see earlier ones."""
    few_shot: Examples | None = None
    """Source of few-shot examples; by default they are other documents of the same source."""

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
            yield from template_problems(f"fields.{name}", template)
        if self.few_shot:
            key = next((key for key in ("path", "mds", "hub") if getattr(self, key) is not None), "text")
            wanted = {"hub": "split"}.get(key, key)
            wrong = {name for name in ("path", "split", "mds") if getattr(self.few_shot, name) is not None} != {wanted}
            if key == "text" or wrong:
                text = "a text file has no examples" if key == "text" else f"this source needs `{wanted}` there"
                yield Problem("few_shot", None, f"{text}")


class Templates(Section):
    """Templates that make the parts of a document from a record's fields. A task has those of its type."""

    query: str | None = None
    """multiple_choice: the question."""
    choices: Texts | None = None
    """multiple_choice: the alternatives: an expression that gives a list, or a list of texts. generation: texts that the
    filters of `extract` look for."""
    gold: str | None = None
    """multiple_choice, schema: the right alternative: its number (from 0), its label, or its text."""
    contexts: Texts | None = None
    """schema: the alternative contexts."""
    context: str | None = None
    """language_modeling, generation, instructions: the text before the continuation or answer."""
    continuation: str | None = None
    """language_modeling, schema: the text that is scored after the context."""
    answer: str | None = None
    """generation: the answer, also in few-shot examples."""
    aliases: Texts | None = None
    """generation: further right answers."""
    chain_of_thought: str | None = None
    """generation, foundry: the reasoning that precedes the answer in examples."""
    text: str | None = None
    """perplexity: the text."""
    original: str | None = None
    """perplexity: the text whose words and bytes count, where `text` is a cleaned form of it."""
    instructions: str | None = None
    """instructions: the list of their names, such as `punctuation:no_comma`."""
    arguments: str | None = None
    """instructions: the list of their arguments, a mapping for each."""
    preamble: str | None = None
    """Text at the beginning of the prompt, before examples (LLM Foundry's prompt_string, lm-evaluation-harness's description)."""

    def templates(self) -> Iterator[tuple[str, list[str]]]:
        """(name, templates) of every template that is given."""
        for name in Templates.model_fields:
            value = getattr(self, name, None)  # not there if it did not decode
            if value is not None:
                yield name, value if isinstance(value, list) else [value]

    def problems(self) -> Iterator[Problem]:
        for name, templates in self.templates():
            for template in templates:
                yield from template_problems(name, template)


class Prompting(Templates):
    """Settings of both conventions; templates given here replace the task's."""

    metric: str | None = None
    """The headline metric."""
    shots: Shots | None = None
    """Numbers of few-shot examples with which the task runs; default: the task's."""
    stops: list[str] | None = None
    """generation, instructions: texts that end the answer; the end-of-document token always does. Default: foundry, none;
    lm-eval, its example_delimiter."""
    few_shot_from: Literal["documents", "few_shot"] | None = None
    """Take examples from the evaluated documents or from source.few_shot. Default: foundry takes documents; lm-eval
    takes source.few_shot where there is one."""

    def problems(self) -> Iterator[Problem]:
        yield from Templates.problems(self)
        if "" in (self.stops or []):
            yield Problem("stops", "", "an empty text would end every answer at once")


class FoundryPrompting(Prompting):
    """LLM Foundry's convention."""

    prelimiter: str = ""
    """Text before every query or context (`question_prelimiter` of LLM Foundry's task files)."""
    example_delimiter: str = "\n"
    """Text between examples."""
    continuation_delimiter: str = " "
    """Text between the query or context and the answer."""
    cot_delimiter: str = ""
    """generation: between chain_of_thought and answer; what follows it in a generated text is the answer."""
    strip: bool = True
    """Strip the fields of white space, and white space off the end of the prompt."""
    normalize: bool = True
    """generation: compare in lower case without articles and punctuation, as TriviaQA's own script does."""

    @property
    def ends(self) -> list[str]:
        """Texts that end an answer."""
        return self.stops or []


class LmEvalPrompting(Prompting):
    """lm-evaluation-harness's convention (0.4.13)."""

    example_delimiter: str = "\n\n"
    """Text between examples (fewshot_delimiter)."""
    continuation_delimiter: str = " "
    """Text between the query or context and the answer (target_delimiter)."""
    sampler: Literal["default", "first_n"] = "default"
    """Choice of examples: at random, or the first ones."""
    avoid_document: bool | None = None
    """Draw one example more and leave out the document itself. lm-evaluation-harness does so where fewshot_split and
    test_split are equal, also when a task names neither. Default: when examples are documents."""
    max_new_tokens: PositiveInt = 256
    """generation, instructions: at most so many tokens (max_gen_toks)."""
    strip: bool = False
    """generation: strip white space off what was generated (remove_whitespace)."""
    extract: dict[str, Chain] = {}
    """generation: ways to find the answer in what was generated: a filter, or filters one after another. Each makes a metric of
    its name."""
    ignore: list[str] = []
    """generation: regular expressions that are removed before comparing (regexes_to_ignore)."""
    ignore_case: bool = False
    """generation: compare in lower case."""
    ignore_punctuation: bool = False
    """generation: compare without punctuation."""

    @property
    def ends(self) -> list[str]:
        """Texts that end an answer: by default the delimiter before the next example."""
        return [self.example_delimiter] * bool(self.example_delimiter) if self.stops is None else self.stops

    def problems(self) -> Iterator[Problem]:
        yield from Prompting.problems(self)
        for pattern in self.ignore:
            yield from pattern_problems("ignore", pattern)


ConventionSettings = FoundryPrompting | LmEvalPrompting


def template_problems(path: str, template: str) -> Iterator[Problem]:
    try:
        Template(template)
    except EvalError as error:
        yield Problem(path, template, str(error))
