"""Recognition of chat data in `data.prepare`: the format by the first record. No library of templates or tokenizers here: `check`
recognises too."""

from collections.abc import Iterator
from typing import Any

from llmtrain.data.chat.conversation import FORMATS, recognise
from llmtrain.data.sources.files import PrepareError, SourceFile, list_files
from llmtrain.data.sources.formats import format_of
from llmtrain.data.sources.token_kinds import token_kind
from llmtrain.schema.chat import ChatSection
from llmtrain.schema.data import PrepareConfig

_FILES = 3
"""Files whose first record is looked at, until one has any."""


def recognised(config: PrepareConfig) -> PrepareConfig:
    """The config with `chat` and its format, where the first record of the sources is of one, and with a packing that cuts no
    conversation; the same config for texts.

    Raises PrepareError for sources that cannot be listed, and where `chat` is given but not its format, which no field tells.
    """
    if config.chat is None or config.chat.format is None:
        keys = next(_first_records(list_files(config.sources), config), None)
        name = None if keys is None or (config.chat is None and config.text_key in keys) else _format(keys, config.chat)
        if name is None and config.chat is not None:
            found = ", ".join(sorted(keys or ())[:8]) or "none"
            raise PrepareError(
                f"{config.sources[0]}: the first record's fields ({found}) are of none of the formats {', '.join(FORMATS)}; name "
                "one with chat.format (--chat-format), and its fields with chat.fields (--chat-field)"
            )
        if name is None:
            return config
        config = config.model_copy(update={"chat": (config.chat or ChatSection()).model_copy(update={"format": name})})
    return config if config.fills_samples else config.model_copy(update={"packing": "best_fit"})


def _format(keys: set[str], section: ChatSection | None) -> str | None:
    fields = section.fields if section else {}
    return recognise((keys - set(fields.values())) | {key for key, own in fields.items() if own in keys})


def _first_records(files: list[SourceFile], config: PrepareConfig) -> Iterator[set[str]]:
    """Fields of the first record of each of the first files that hold records."""
    for file in files[:_FILES]:
        if token_kind(file.path, file.from_folder):
            continue
        shape = format_of(file.path, file.name, config.text_key, file.from_folder)
        if shape is None or shape.kind == "text":
            continue
        from llmtrain.data.sources.record_text import record_key  # here, because texts need none
        from llmtrain.data.sources.records import SetAside, read_pieces, whole

        found: list[set[str]] = []

        def note(record: Any, found: list[set[str]] = found) -> tuple[str, None]:
            found.append(set(record) if isinstance(record, dict) else set())
            return "x", None  # any text, with which the first records are yielded

        try:
            next(read_pieces(whole(file), record_key(config.text_key, note)), None)
        except SetAside:
            continue  # said where it is read
        yield from found[:1]
