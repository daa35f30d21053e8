"""Documents, made from records by a task's templates; errors name the record's file and line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from llmtrain.eval.errors import EvalError, prefixed
from llmtrain.eval.instructions import Instruction, read_instruction
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
    """Content of a perplexity document. original: the text whose words and bytes count, if it is another."""

    text: str
    original: str | None = None


@dataclass(frozen=True)
class Question:
    """Content of a generation document: the answer is free text; `answer` and all of `aliases` are right."""

    context: str
    answer: str
    aliases: tuple[str, ...]
    chain_of_thought: str | None = None
    choices: tuple[str, ...] = ()
    """Texts that filters look for in what was generated."""


@dataclass(frozen=True)
class Instructed:
    """Content of an instructions document: a prompt, and the instructions in it that a program can check."""

    context: str
    instructions: tuple[Instruction, ...]


Content = Choices | Schema | Continuation | Text | Question | Instructed


class AnyDocument(Protocol):
    """All that evaluation and decontamination ask of a document, also of one of another project's task file.

    index: position among the task's documents, from 0, which identifies it in requests. where: file and line of its record.
    record: the source's fields. text: the document with its right answer as plain text, without examples.
    """

    @property
    def index(self) -> int: ...

    @property
    def where(self) -> str: ...

    @property
    def record(self) -> Mapping[str, Any]: ...

    @property
    def text(self) -> str: ...


@dataclass(frozen=True)
class Document:
    """One document of a task.

    index: position among the documents of the source, from 0; identifies the document in requests. where: file and line of its
    record. record: the source's fields.
    """

    index: int
    where: str
    content: Content
    category: str | None = None
    preamble: str = ""
    premise: str | None = None
    """Context of the choices in PMI scores, in place of the query."""
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def text(self) -> str:
        """The document with its right answer as plain text, without examples or delimiters of a convention."""
        if isinstance(self.content, Text):
            return self.content.text
        if isinstance(self.content, Instructed):
            return self.content.context
        return joined_text(*asked_and_answered(self.content))


class DocumentTemplates:
    """Compiled templates of a task under one convention."""

    def __init__(self, task: TaskConfig, source: Source, convention: Convention):
        self._task, self._convention = task, convention
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
        """Document of a record. Raises EvalError with the reason alone."""
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
                text = self._some_text("text", names)
                return Text(text, self._some_text("original", names) if "original" in self._templates else None)
            case "generation":
                answer = self._some_text("answer", names)
                choices = self._list_of_texts("choices", names) if "choices" in self._templates else ()
                aliases, reasoning = self._list_of_texts("aliases", names), self._reasoning(names)
                return Question(self._text("context", names), answer, aliases, reasoning, choices)
            case "instructions":
                return Instructed(self._some_text("context", names), self._instructions(names))

    def _text(self, name: str, names: dict[str, Any]) -> str:
        with prefixed(f"`{name}`"):
            return self._templates[name][0].text(names)

    def _some_text(self, name: str, names: dict[str, Any]) -> str:
        text = self._text(name, names)
        if not text.strip():
            raise EvalError(f"`{name}` is empty; there is nothing to score")
        return text

    def _reasoning(self, names: dict[str, Any]) -> str | None:
        """Chain of thought; None where its template gives null. Only foundry puts it into examples."""
        if self._convention != "foundry":
            return None
        [template] = self._templates["chain_of_thought"]
        with prefixed("`chain_of_thought`"):
            return None if template.value(names) is None else template.text(names)

    def _list(self, name: str, names: dict[str, Any]) -> list[Any]:
        values: list[Any] = []
        for template in self._templates[name]:
            with prefixed(f"`{name}`"):
                value = template.value(names)
            values += value if isinstance(value, list | tuple) else [value]
        return values

    def _list_of_texts(self, name: str, names: dict[str, Any]) -> tuple[str, ...]:
        values = self._list(name, names)
        for value in values:
            if not isinstance(value, str):
                raise EvalError(f"`{name}` holds {value!r}; expected texts")
        return tuple(values)

    def _instructions(self, names: dict[str, Any]) -> tuple[Instruction, ...]:
        listed, arguments = self._list("instructions", names), self._list("arguments", names)
        if not listed or len(listed) != len(arguments):
            raise EvalError(
                f"{len(listed)} `instructions` have {len(arguments)} `arguments`; expected one each, at least one"
            )
        return tuple(read_instruction(name, some) for name, some in zip(listed, arguments, strict=True))

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
        with prefixed("`gold`"):
            value = self._templates["gold"][0].value(names)
        labels = self._task.labels
        if labels is not None and not isinstance(value, bool) and str(value) in labels:
            number = labels.index(str(value))
        elif isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
            number = int(value)
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


def joined_text(before: str, answer: str) -> str:
    """Text and its answer with one space between them, or none before a punctuation mark."""
    answer = answer.strip()
    return before.rstrip() + " " * (answer[:1] not in (*".,;:!?", "")) + answer


def asked_and_answered(content: Content) -> tuple[str, str]:
    """The question of a document, or the text before, and the right answer."""
    match content:
        case Choices():
            return content.query, content.choices[content.gold]
        case Schema():
            return content.contexts[content.gold], content.continuation
        case Continuation():
            return content.context, content.continuation
        case Question():
            return content.context, content.answer
        case Text() | Instructed():
            raise AssertionError(f"no examples are made of {type(content).__name__}")


def without_reasoning(documents: Sequence[Document]) -> dict[str, str]:
    """Locations of documents without a chain of thought, with the reason, where others have one."""
    lacking = [one for one in documents if isinstance(one.content, Question) and one.content.chain_of_thought is None]
    if len(lacking) in (0, len(documents)):
        return {}
    reason = "`chain_of_thought` is missing, which other records have; an example would be without its reasoning"
    return {one.where: reason for one in lacking}


def group_by_category(documents: Sequence[Document]) -> dict[str | None, list[Document]]:
    """Documents by category, in alphabetical order; one group where the task has no categories."""
    groups: dict[str | None, list[Document]] = {}
    for document in documents:
        groups.setdefault(document.category, []).append(document)
    return {name: groups[name] for name in sorted(groups, key=lambda name: name or "")}
