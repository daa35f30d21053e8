"""Second, plain implementation of LLM Foundry's convention, on Hugging Face tokenizers.

It shares no code with llmtrain.eval and keeps to one function per type of task, so that it can be read line by line.
A request is (context ids, continuation ids), or (context ids, most new tokens) where text is generated.
"""

import random
import re
import string
from collections.abc import Callable, Iterator
from typing import Any

Record = dict[str, Any]


class FoundrySettings:
    """Settings of a task, by LLM Foundry's names and with its defaults."""

    def __init__(self, **settings: Any):
        self.prompt_string = ""
        self.example_delimiter = "\n"
        self.continuation_delimiter = " "
        self.prelimiter = ""
        self.cot_delimiter = ""
        self.early_stopping_criteria: list[str] = []
        self.do_normalization = True
        for name, value in settings.items():
            assert hasattr(self, name), name
            setattr(self, name, value)


def stripped(record: Record) -> Record:
    """Record with texts stripped of white space; lists are unchanged."""
    return {key: value.strip() if isinstance(value, str) else value for key, value in record.items()}


def examples_of(count: int, index: int, shots: int, rng: random.Random) -> set[int]:
    """Indices of examples, drawn for every document from one generator."""
    chosen = set(rng.sample(range(count), min(shots, count - 1)))
    if index in chosen:
        chosen.discard(index)
        while True:
            another = rng.choice(range(count))
            if another != index and another not in chosen:
                chosen.add(another)
                break
    return chosen


def begin(tokenizer: Any, text: str) -> list[int]:
    """Ids of the text before the document, with special tokens, but without an EOS at its end."""
    ids = tokenizer(text)["input_ids"]
    if tokenizer.eos_token_id is not None and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids


def plain(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def spaced(tokenizer: Any, text: str) -> str:
    """A continuation begins with a space, for tokenizers in which a space and a letter make one token."""
    if len(plain(tokenizer, " a")) == 1 and not text.startswith(" "):
        return " " + text
    return text


def question_context(settings: FoundrySettings, text: str, before: str) -> str:
    context = settings.prelimiter + text
    if before:
        context = settings.example_delimiter + context
    return context + settings.continuation_delimiter


def prompted(
    records: list[Record], settings: FoundrySettings, shots: int, example: Callable[[Record, str], str]
) -> Iterator[tuple[Record, str]]:
    """Each record, and what stands before its question. example: text of a record behind what is there already."""
    records = [stripped(record) for record in records]
    rng = random.Random(1234)
    for index, record in enumerate(records):
        before = settings.prompt_string
        for number in examples_of(len(records), index, shots, rng) if shots else ():
            before += example(records[number], before)
        yield record, before


def asked(record: Record, key: str, before: str, tokenizer: Any, settings: FoundrySettings) -> list[int]:
    """Tokens of what stands before a question and of the question."""
    return begin(tokenizer, before) + plain(tokenizer, question_context(settings, record[key], before).rstrip())


def multiple_choice(records: list[Record], tokenizer: Any, settings: FoundrySettings, shots: int) -> list[list[Any]]:
    def example(one: Record, before: str) -> str:
        return question_context(settings, one["query"], before) + one["choices"][one["gold"]]

    return [
        [
            (asked(record, "query", before, tokenizer, settings), plain(tokenizer, spaced(tokenizer, choice)))
            for choice in record["choices"]
        ]
        for record, before in prompted(records, settings, shots, example)
    ]


def schema(records: list[Record], tokenizer: Any, settings: FoundrySettings, shots: int) -> list[list[Any]]:
    def example(one: Record, before: str) -> str:
        context = one["context_options"][one["gold"]]
        if before:
            context = settings.example_delimiter + context
        return settings.prelimiter + context + settings.continuation_delimiter + one["continuation"]

    documents = []
    for record, before in prompted(records, settings, shots, example):
        if before:
            end = settings.continuation_delimiter.rstrip()
            contexts = [
                settings.prelimiter + settings.example_delimiter + one + end for one in record["context_options"]
            ]
        else:
            contexts = [settings.prelimiter + one for one in record["context_options"]]
        continuation = plain(tokenizer, spaced(tokenizer, record["continuation"]))
        documents.append([(begin(tokenizer, before) + plain(tokenizer, one), continuation) for one in contexts])
    return documents


def language_modeling(records: list[Record], tokenizer: Any, settings: FoundrySettings, shots: int) -> list[list[Any]]:
    def example(one: Record, before: str) -> str:
        return question_context(settings, one["context"], before) + one["continuation"]

    return [
        [
            (
                asked(record, "context", before, tokenizer, settings),
                plain(tokenizer, spaced(tokenizer, record["continuation"])),
            )
        ]
        for record, before in prompted(records, settings, shots, example)
    ]


def generation(records: list[Record], tokenizer: Any, settings: FoundrySettings, shots: int) -> list[list[Any]]:
    def reasoned(one: Record, answer: str) -> str:
        return one["chain_of_thought"] + settings.cot_delimiter + answer if "chain_of_thought" in records[0] else answer

    def example(one: Record, before: str) -> str:
        return question_context(settings, one["context"], before) + reasoned(one, one["answer"])

    texts = [reasoned(one, answer) for one in records for answer in [one["answer"], *one.get("aliases", [])]]
    longest = max(len(tokenizer(text)["input_ids"]) for text in texts)
    longest = max(longest + (10 if settings.cot_delimiter else 0), 1)
    return [
        [(asked(record, "context", before, tokenizer, settings), longest)]
        for record, before in prompted(records, settings, shots, example)
    ]


TYPES = {
    "multiple_choice": multiple_choice,
    "schema": schema,
    "language_modeling": language_modeling,
    "generation": generation,
}


def requests(
    kind: str, records: list[Record], tokenizer: Any, settings: FoundrySettings, shots: int, categories: bool
) -> list:
    """Requests per document; with categories, category after category, each as a data set of its own."""
    if not categories:
        return TYPES[kind](records, tokenizer, settings, shots)
    documents = []
    for category in sorted({record["category"] for record in records}):
        part = [record for record in records if record["category"] == category]
        documents += TYPES[kind](part, tokenizer, settings, shots)
    return documents


def picks_gold(record: Record, mean_losses: list[float]) -> bool:
    """The alternative of the lowest mean cross entropy per token, the first of equals."""
    return mean_losses.index(min(mean_losses)) == record["gold"]


def normalized(text: str) -> str:
    text = text.replace("_", " ").lower()
    text = "".join(" " if letter in string.punctuation + "‘’´`" else letter for letter in text)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def answered(record: Record, text: str, settings: FoundrySettings) -> bool:
    """The cleaned text begins with a cleaned right answer."""
    if settings.early_stopping_criteria:
        text = re.split("|".join(settings.early_stopping_criteria), text)[0]
    if settings.cot_delimiter:
        text = text.split(settings.cot_delimiter)[-1]
    clean = normalized if settings.do_normalization else str.strip
    right = [clean(answer) for answer in [record["answer"], *record.get("aliases", [])]]
    return any(clean(text).startswith(answer) for answer in right)
