"""A task of lm-evaluation-harness by its own class: prompts, examples, filters, metrics and aggregations are lm_eval's code.

What is replaced in it: where data come from, templates (tasks/templates.py), and values that it would take in silence. Examples
are read when there are some to draw, not for every task. Imports lm_eval: only for tasks that run.
"""

from __future__ import annotations

import ast
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property, wraps
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.samplers import ContextSampler, get_sampler
from lm_eval.api.task import ConfigurableTask

from llmtrain.errors import first_line
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.code import load_function, references
from llmtrain.eval.lm_eval.data import DataSet, failures
from llmtrain.eval.lm_eval.settings import SEED, Settings
from llmtrain.eval.lm_eval.yaml_file import Function
from llmtrain.eval.prompts.chat import PromptStyle
from llmtrain.eval.tasks.templates import render

Record = dict[str, Any]

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings, one for each document, are of what is checked here

_KEPT_TEXTS = 1 << 15
_RANDOM_SEED = 0
"""Seed of `random`, by which some process_docs shuffle choices (gpqa): the harness's, for the first task of its run."""


class RenderedTexts:
    """Texts of templates by record, each rendered once: prompts are checked, written and reported of the same records.

    Nothing is kept where code of the task sees records, which it might change.
    """

    def __init__(self, settings: Settings):
        own = {key: value for key, value in settings.data.items() if key not in ("process_docs", "custom_dataset")}
        self._keeps = not any(True for _ in references(own))
        self._known: dict[tuple[int, str], tuple[Record, str]] = {}

    def render(self, template: str, record: Record) -> str:
        if not self._keeps:
            return render(template, record)
        key = id(record), template  # the record is kept as well, so that no other gets its id
        if key not in self._known:
            if len(self._known) >= _KEPT_TEXTS:
                self._known.clear()
            self._known[key] = record, render(template, record)
        return self._known[key][1]


class HarnessTask(ConfigurableTask):
    """Task with its data. data_dir: as of `DataSet`. Raises EvalError for data that cannot be read, and for code that fails."""

    def __init__(self, settings: Settings, data_dir: Path | None = None):
        metadata = settings.data.get("metadata", {})
        metadata = metadata if isinstance(metadata, dict) else {"_metadata": metadata}
        given = {**settings.data, "metadata": metadata | {"config_source": str(settings.file)}}
        self._data, self._texts = DataSet(given, settings.file, data_dir), RenderedTexts(settings)
        with _seeded(), failures("lm-evaluation-harness cannot make the task"):
            super().__init__(config=_resolved(given))

    # Data

    def download(self, dataset_kwargs: Any = None, **kwargs: Any) -> None:
        self.dataset = self._data

    @cached_property
    def eval_docs(self) -> Any:  # a property there, which runs process_docs anew each time
        config = self.config
        split = config.test_split or config.validation_split
        where = f"{self._data.title} [{split}]"
        with _seeded(), failures(f"{where} cannot be read"):
            found = super().eval_docs
            if not hasattr(found, "features"):
                kind = type(found).__name__
                raise EvalError(f"{where}: process_docs gives {kind}; lm-evaluation-harness takes a Dataset alone")
            if not len(found):
                raise EvalError(f"{where} holds no documents")
            return found

    def fewshot_docs(self) -> Any:
        return None  # for the constructor; `sampler` reads them

    @cached_property
    def sampler(self) -> ContextSampler:
        with _seeded(), failures(f"{self._data.title}: few-shot examples cannot be read"):
            return get_sampler(self.fewshot_cfg.sampler)(list(super().fewshot_docs()), rnd=None)

    @property
    def excludes_document(self) -> bool:
        """True if one more example is drawn and the document itself is dropped."""
        return self.fewshot_cfg.split == self.config.test_split

    def where(self, number: int) -> str:
        """Place of an evaluated document."""
        return f"{self._data.title} [{self.config.test_split or self.config.validation_split}]:{number + 1}"

    def fresh(self) -> HarnessTask:
        """The same task whose examples are drawn from the beginning."""
        made = copy(self)
        made.sampler = copy(self.sampler)
        made.set_fewshot_seed(SEED)
        return made

    def without_mutual_information(self) -> HarnessTask:
        """The same task without acc_mutual_info, and so without the log-likelihoods of choices alone."""
        made = copy(self)
        made._metric_fn_list = {k: v for k, v in self._metric_fn_list.items() if k != "acc_mutual_info"}
        return made

    # Parts of a document

    def doc_to_text(self, doc: Record, doc_to_text: Any = None) -> Any:
        written = self.config.doc_to_text if doc_to_text is None else doc_to_text
        with failures("`doc_to_text`"):
            if isinstance(written, str) and written not in self.features:
                return self._number_or_text(self._texts.render(written, doc))
            return super().doc_to_text(doc, doc_to_text)

    def doc_to_target(self, doc: Record, doc_to_target: Any = None) -> Any:
        written = self.config.doc_to_target if doc_to_target is None else doc_to_target
        with failures("`doc_to_target`"):
            if not isinstance(written, str) or written in self.features:
                return _plain(super().doc_to_target(doc, doc_to_target))
            text = self._texts.render(written, doc)
            if len(text) >= 2 and text[0] == "[" and text[-1] == "]":
                try:
                    return ast.literal_eval(text)
                except (SyntaxError, ValueError):
                    return text
            return self._number_or_text(text)

    def _number_or_text(self, text: str) -> Any:
        return ast.literal_eval(text) if text.isdigit() and self.config.doc_to_choice is not None else text

    def doc_to_choice(self, doc: Record, doc_to_choice: Any = None) -> list[str]:
        written = self.config.doc_to_choice if doc_to_choice is None else doc_to_choice
        with failures("`doc_to_choice`"):
            if isinstance(written, str) and written not in self.features:
                found = ast.literal_eval(self._texts.render(written, doc))
            else:
                found = super().doc_to_choice(doc, doc_to_choice)
            if not isinstance(found, list | tuple) or not found or not all(isinstance(one, str) for one in found):
                quotes = isinstance(found, list) and any(isinstance(one, bool) for one in found)
                advice = "; put yes and no in quotes" if quotes else ""
                raise EvalError(f"`doc_to_choice` gives {found!r}; expected a list of texts{advice}")
            return list(found)

    def doc_to_prefix(self, doc: Record) -> str | None:
        written = self.config.gen_prefix
        if written is None:
            return None
        with failures("`gen_prefix`"):
            return doc[written] if written in self.features else self._texts.render(written, doc)

    @staticmethod
    def resolve_field(doc: Record, field: str | None = None) -> Any:
        if not field:
            return None
        with failures(f"`{field}`"):
            return doc[field] if field in doc else render(field, doc)

    def build_qa_turn(self, *, q: Any = None, c: Any = None, a: Any = None, **rest: Any) -> Any:
        if not isinstance(q, str):
            raise EvalError(f"`doc_to_text` gives {q!r}; expected a text")
        chosen = c[a] if c and isinstance(a, int) else a[0] if isinstance(a, list) else a
        if chosen is not None and not isinstance(chosen, str):
            raise EvalError(f"`doc_to_target` gives {a!r}; expected a text, or the number of a choice")
        return super().build_qa_turn(q=q, c=c, a=a, **rest)

    # Requests and scores

    def instances_of(self, number: int, doc: Record, shots: int, style: PromptStyle) -> list[Instance]:
        """Requests of a document, as lm_eval's `build_all_requests` makes them."""
        template = style.template
        chat = {
            "apply_chat_template": template is not None,
            "chat_template": None if template is None else _renderer(template.render),
        }
        context = self.fewshot_context(
            doc,
            num_fewshot=shots,
            system_instruction=style.system,
            fewshot_as_multiturn=style.multiturn,
            gen_prefix=self.doc_to_prefix(doc),
            **chat,
        )
        made = self.construct_requests(doc, context, metadata=(self.config.task, number, self.config.repeats), **chat)
        return made if isinstance(made, list) else [made]

    def filtered(self, instances: Sequence[Instance]) -> None:
        """Apply the filters to the responses of instances, all at once."""
        self._instances = list(instances)
        try:
            self.apply_filters()
        except EvalError:
            raise
        except Exception as error:
            raise EvalError(f"filter_list: a filter failed: {first_line(error)}") from None

    def check_answer(self, doc: Record) -> None:
        """Check what is compared with the model's answer, before it is asked. Raises EvalError."""
        names = [step.get("function") for one in self.config.filter_list or () for step in one["filter"]]
        if "multi_choice_regex" in names and not _are_texts(doc.get("choices")):
            raise EvalError(
                f"the filter multi_choice_regex needs a column `choices` of texts; there are {', '.join(doc)}"
            )
        if self.config.process_results is not None:
            return
        if self.OUTPUT_TYPE == "multiple_choice":
            self._check_right_choice(self.doc_to_text(doc) if self.multiple_input else self.doc_to_target(doc))
        elif self.OUTPUT_TYPE == "generate_until" and self.config.doc_to_choice is not None:
            gold, choices = self.doc_to_target(doc), self.doc_to_choice(doc)
            if not isinstance(gold, int):
                raise EvalError(f"`doc_to_target` gives {gold!r}; with doc_to_choice, expected the number of a choice")
            if not -len(choices) <= gold < len(choices):
                raise EvalError(f"`doc_to_target` gives {gold}, but there are {len(choices)} choices")

    def _check_right_choice(self, gold: Any) -> None:
        several = bool(self.multiple_target)
        if isinstance(gold, list) != several:
            raise EvalError(f"`doc_to_target` gives {gold!r}, but that of the first document is of another kind")
        if not isinstance(gold, str) and not all(isinstance(one, int) for one in (gold if several else [gold])):
            wanted = "the numbers of choices" if several else "the number or the text of a choice"
            raise EvalError(f"`doc_to_target` gives {gold!r}; expected {wanted}")


def _resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for lm_eval's class, with functions imported. lm_eval would look up `hf_evaluate` metrics on the hub."""

    def plain(value: Any) -> Any:
        if isinstance(value, Function):
            return load_function(value)
        if isinstance(value, Mapping):
            return {key: plain(one) for key, one in value.items()}
        return [plain(one) for one in value] if isinstance(value, list) else value

    made = {key: plain(value) for key, value in given.items() if key not in ("group", "tag", "task_list")}
    for entry in made.get("metric_list", ()):
        entry.pop("hf_evaluate", None)
    for chain in made.get("filter_list", ()):
        chain["name"] = str(chain["name"])
    for section in (made, made.get("fewshot_config", {})):
        if callable(function := section.get("process_docs")):
            section["process_docs"] = _named(function)
    return made


def _plain(value: Any) -> Any:
    """A value without NumPy's types, in which code of a task may give numbers of choices."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """process_docs, of which errors name it."""

    @wraps(function)
    def call(rows: Any) -> Any:
        with failures(f"process_docs ({function.__name__}) failed"):
            return function(rows)

    return call


def _renderer(render_chat: Callable[..., str]) -> Callable[..., str]:
    return lambda history, add_generation_prompt=True: render_chat(
        history, continue_final_message=not add_generation_prompt
    )


@contextmanager
def _seeded() -> Iterator[None]:
    """Context in which Python's and NumPy's global generators stand where the harness sets them before it loads tasks."""
    states = random.getstate(), np.random.get_state()
    random.seed(_RANDOM_SEED)
    np.random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, str) for one in value)
