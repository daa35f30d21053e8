"""Documents, made from records by a task's templates; errors name the record's file and line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmtrain.eval.errors import EvalError
from llmtrain.eval.tasks.config import TEMPLATES, Convention, TaskConfig
from llmtrain.eval.tasks.sections import Source
from llmtrain.eval.tasks.sources import Record
from llmtrain.eval.tasks.templates import Template


@dataclass(frozen=True)
class Choices:
    """Content of a multiple_choice document: one query, several choices."""

    query: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Schema:
    """Content of a schema document: contexts and one continuation (partial evaluation, Trinh and Le 2018, arXiv:1806.02847)."""

    contexts: tuple[str, ...]
    continuation: str
    gold: int


@dataclass(frozen=True)
class Continuation:
    """Content of a language_modeling document: a context and its continuation."""

    context: str
    continuation: str


@dataclass(frozen=True)
class Text:
    """Content of a perplexity document."""

    text: str


@dataclass(frozen=True)
class Question:
    """Content of a generation document: the answer is free text; `answer` and all of `aliases` are right."""

    context: str
    answer: str
    aliases: tuple[str, ...]
    chain_of_thought: str | None = None


Content = Choices | Schema | Continuation | Text | Question


@dataclass(frozen=True)
class Document:
    """One document of a task.

    index: position in the whole source, from 0; identifies the document in requests. where: file and line of its record. record:
    the source's fields.
    """

    index: int
    where: str
    content: Content
    category: str | None = None
    preamble: str = ""
    premise: str | None = None
    """Context of the choices in PMI scores, in place of the query."""
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)


class DocumentTemplates:
    """Compiled templates of a task under one convention."""

    def __init__(self, task: TaskConfig, source: Source, convention: Convention):
        self._task = task
        self._fields = {name: Template(text) for name, text in source.fields.items()}
        section = task.section(convention)
        self._templates: dict[str, list[Template]] = {}
        for name, default in TEMPLATES[task.type].items():
            written = next(
                (it for it in (getattr(section, name), getattr(task, name), default) if it is not None), None
            )
            if written is not None:
                sources = written if isinstance(written, list) else [written]
                self._templates[name] = [Template(text) for text in sources]
        # An empty preamble in a convention's section takes away the task's.
        preamble = section.preamble if section.preamble is not None else task.preamble
        self._preamble = Template(preamble) if preamble else None
        self._category = Template(task.category) if task.category else None
        self._premise = Template(task.pmi) if task.pmi is not None else None

    def document(self, record: Record, index: int) -> Document:
        """Document of a record. Raises EvalError with file and line."""
        try:
            names = {"record": record.data, **record.data}
            for name, template in self._fields.items():
                names[name] = template.value(names)
            content = self._content(names)
            return Document(
                index=index,
                where=record.where,
                content=content,
                category=self._category.text(names) if self._category else None,
                preamble=self._preamble.text(names) if self._preamble else "",
                premise=self._premise.text(names) if self._premise else None,
                record=record.data,
            )
        except EvalError as error:
            raise EvalError(f"{record.where}: {error}") from None

    def _content(self, names: dict[str, Any]) -> Content:
        match self._task.type:
            case "multiple_choice":
                choices = self._texts("choices", names)
                return Choices(self._text("query", names), choices, self._gold(names, choices))
            case "schema":
                contexts = self._texts("contexts", names)
                return Schema(contexts, self._some_text("continuation", names), self._gold(names, contexts))
            case "language_modeling":
                return Continuation(self._text("context", names), self._some_text("continuation", names))
            case "perplexity":
                return Text(self._some_text("text", names))
            case "generation":
                reasoning = self._text("chain_of_thought", names) if "chain_of_thought" in self._templates else None
                answer = self._some_text("answer", names)
                return Question(self._text("context", names), answer, self._aliases(names), reasoning)

    def _text(self, name: str, names: dict[str, Any]) -> str:
        try:
            return self._templates[name][0].text(names)
        except EvalError as error:
            raise EvalError(f"`{name}`: {error}") from None

    def _some_text(self, name: str, names: dict[str, Any]) -> str:
        text = self._text(name, names)
        if not text.strip():
            raise EvalError(f"`{name}` is empty; there is nothing to score")
        return text

    def _list(self, name: str, names: dict[str, Any]) -> list[Any]:
        values: list[Any] = []
        for template in self._templates[name]:
            try:
                value = template.value(names)
            except EvalError as error:
                raise EvalError(f"`{name}`: {error}") from None
            values += value if isinstance(value, list | tuple) else [value]
        return values

    def _aliases(self, names: dict[str, Any]) -> tuple[str, ...]:
        values = self._list("aliases", names)
        for value in values:
            if not isinstance(value, str):
                raise EvalError(f"`aliases` holds {value!r}; expected texts")
        return tuple(values)

    def _texts(self, name: str, names: dict[str, Any]) -> tuple[str, ...]:
        """Texts of a list of at least two, none of them empty."""
        values = self._list(name, names)
        for number, value in enumerate(values):
            if not isinstance(value, str):
                raise EvalError(f"`{name}` {number} is {value!r}; expected a list of texts")
            if not value.strip():
                raise EvalError(f"`{name}` {number} (from 0) is empty; there is nothing to score")
        if len(values) < 2:
            raise EvalError(f"`{name}` has {len(values)} of the at least two alternatives: {values}")
        return tuple(values)

    def _gold(self, names: dict[str, Any], alternatives: tuple[str, ...]) -> int:
        try:
            value = self._templates["gold"][0].value(names)
        except EvalError as error:
            raise EvalError(f"`gold`: {error}") from None
        labels = self._task.labels
        if labels is not None and not isinstance(value, bool) and str(value) in labels:
            number = labels.index(str(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, str) and value in alternatives:
            number = alternatives.index(value)
            if value.isdecimal() and int(value) != number:
                raise EvalError(f"`gold` is {value!r}, which may be a number or the text of alternative {number}")
        elif labels is None and isinstance(value, str) and value.strip().isdecimal():
            number = int(value)
        else:
            allowed = f"one of the labels {', '.join(labels)}" if labels else "a number, or one of the alternatives"
            raise EvalError(f"`gold` is {value!r}; expected {allowed}")
        if not 0 <= number < len(alternatives):
            raise EvalError(f"`gold` is {value!r}, but there are {len(alternatives)} alternatives, counted from 0")
        return number


def document_text(document: Document) -> str:
    """Document with its right answer as plain text, without examples or delimiters of a convention."""
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
    """Both texts with one space between them, or none before a punctuation mark."""
    answer = answer.strip()
    return before.rstrip() + " " * (answer[:1] not in (*".,;:!?", "")) + answer


def group_by_category(documents: Sequence[Document]) -> dict[str | None, list[Document]]:
    """Documents by category, in alphabetical order; one group where the task has no categories."""
    groups: dict[str | None, list[Document]] = {}
    for document in documents:
        groups.setdefault(document.category, []).append(document)
    return {name: groups[name] for name in sorted(groups, key=lambda name: name or "")}
