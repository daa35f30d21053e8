"""Settings of samples, the key of records and a tokenizer, for chat data that was recognised."""

from collections.abc import Iterator, Sequence
from functools import partial

from llmtrain.data.chat import preferences
from llmtrain.data.chat.conversation import FORMATS, PREFERENCES
from llmtrain.data.chat.samples import ChatSettings, rendering_of
from llmtrain.data.chat.template import CHATML_TOKENS, ChatError, ChatTemplate, find_template
from llmtrain.data.sources.files import PrepareError, SourceFile
from llmtrain.data.sources.record_text import record_key
from llmtrain.data.sources.sample import training_texts
from llmtrain.data.tokenize.tokenizer import TextTokenizer, train_bpe
from llmtrain.schema.chat import ChatSection
from llmtrain.schema.data import PrepareConfig


def chat_settings(config: PrepareConfig, tokenizer: TextTokenizer | None) -> ChatSettings | None:
    """Settings by which the records of a recognised config become samples; None for texts. tokenizer: None while it is to be
    trained. Raises PrepareError without a chat template."""
    section = config.chat
    if section is None:
        return None
    assert section.format is not None
    template, preferring = None, section.format in PREFERENCES
    if preferring and (section.prompts, section.targets) != ("none", "all"):
        raise PrepareError(f"chat.prompts and chat.targets have no effect on {section.format}; leave them out")
    if section.format != "completion" or section.template is not None:
        try:
            template = find_template(tokenizer, None if section.template == "tokenizer" else section.template)
        except ChatError as error:
            if preferring and section.template is None:  # for records of messages, which then say so
                return _settings(section, None)
            raise PrepareError(f"{error}, or `chatml`, as chat.template (--chat-template)") from None
    return _settings(section, template)


def _settings(section: ChatSection, template: ChatTemplate | None) -> ChatSettings:
    assert section.format is not None
    plain, fields = section.format in PREFERENCES and section.template is None, tuple(section.fields.items())
    return ChatSettings(section.format, fields, template, section.targets, section.prompts, plain)


def key_of(config: PrepareConfig, settings: ChatSettings | None) -> str:
    """`text_key` of a config: of texts its own; else the key that makes samples of whole records."""
    if settings is None:
        return config.text_key
    first = FORMATS[settings.name][0][0]
    convert = partial(preferences.convert, settings) if settings.name in PREFERENCES else settings.convert
    return record_key(dict(settings.fields).get(first, first), convert)


def train_tokenizer(corpora: Sequence[tuple[PrepareConfig, list[SourceFile]]]) -> TextTokenizer:
    """A tokenizer of the training texts of recognised configs, of their `vocab_size`. It has the special tokens of `chatml` where a
    config names that template.

    Raises what `training_texts` and `train_bpe` raise.
    """
    size = corpora[0][0].vocab_size
    assert size is not None  # PrepareConfig.problems()
    chatml = any(config.chat is not None and config.chat.template == "chatml" for config, _ in corpora)

    def texts() -> Iterator[str]:
        for config, files in corpora:
            settings = chat_settings(config, None)
            found = training_texts(config, files, key_of(config, settings))
            if settings is None:
                yield from found
            elif settings.name in PREFERENCES:
                yield from (_plain(one) for text in found for one in preferences.texts_of(text))
            else:
                yield from (_plain(rendering_of(text).text) for text in found)

    return train_bpe(texts(), size, further=CHATML_TOKENS if chatml else ())


def _plain(text: str) -> str:
    for token in CHATML_TOKENS:
        text = text.replace(token, "")
    return text
