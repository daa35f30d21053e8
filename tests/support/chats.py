"""Conversations for tests, with answers of very different lengths, prepared."""

import json
import random
from pathlib import Path
from typing import Any

from llmtrain.data.chat.conversation import Conversation
from llmtrain.data.chat.samples import ChatSettings, Sample, SampleEncoder
from llmtrain.data.prepare import prepare
from llmtrain.data.tokenize.encode import DocumentMarks
from llmtrain.schema.data import PrepareConfig

COLOURS = "red green blue yellow black white".split()  # noqa: SIM905


def conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Messages of conversations of one or two questions."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        turns = []
        for _ in range(rng.choice((1, 1, 2))):
            said = " ".join(rng.choice(COLOURS) for _ in range(rng.choice((1, 2, 9))))
            turns += [{"role": "user", "content": f"Repeat {said}"}, {"role": "assistant", "content": said}]
        found.append(turns)
    return found


def encoded(tokenizer: Any, settings: ChatSettings, chat: Conversation, closes: bool = False) -> Sample:
    """The sample of a conversation by a tokenizer of transformers."""
    marks = DocumentMarks(tokenizer.eos_token_id, closes=closes)
    [sample] = SampleEncoder(tokenizer.backend_tokenizer.to_str(), marks, settings)([settings.render(chat)])
    return sample


def marked_by_transformers(tokenizer: Any, template: str, chat: Conversation) -> tuple[list[int], list[bool]]:
    """Ids, and which of them a template marks as answers."""
    options = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
    found = tokenizer.apply_chat_template(chat.messages, tools=chat.tools, **options)
    return found["input_ids"], [bool(one) for one in found["assistant_masks"]]


def write_chats(file: Path, chats: list[list[dict[str, str]]]) -> str:
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return str(file)


def prepare_chats(folder: Path, packing: str, count: int = 600, seq_len: int = 64, **chat: Any) -> Path:
    """The folder of shards of conversations that no sample is too short for."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"vocab_size": 300, "seq_len": seq_len, "validation_fraction": 0.1, "workers": 1, "packing": packing}
    values |= {"sources": [write_chats(folder / "chats.jsonl", conversations(count))], "out": str(folder / "shards")}
    prepare(PrepareConfig.model_validate(values | {"chat": {"template": "chatml"} | chat}), progress=False)
    return folder / "shards"
