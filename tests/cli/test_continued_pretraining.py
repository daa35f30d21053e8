"""docs/continued-pretraining.md as a reader follows it, with small random models as transformers publishes them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from llmtrain.models.hf.hf_checkpoint import open_hf_checkpoint
from tests.support import checkpoints
from tests.support.conversion import CONFIGS
from tests.support.processes import LLMTRAIN, output_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "continued-pretraining.md"
CHAT = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
VOCAB = 384
"""Rows of the embedding, a multiple of 128; the tokenizer has 270 tokens."""


def qwen3() -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return Qwen3Config(**sizes, **heads, tie_word_embeddings=True)


MODELS = {"qwen3": qwen3, "nemotron_h": CONFIGS["nemotron_h"]}


def publish(folder: Path, kind: str) -> None:
    torch.manual_seed(3)
    config = MODELS[kind]()
    config.vocab_size = VOCAB
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    checkpoints.tokenizer().save(folder)
    (folder / "chat_template.jinja").write_text(CHAT)


def shell(folder: Path, command: str) -> str:
    """Run a command line; `llmtrain` is this one."""
    line = re.sub(r"(?<![\w/.-])llmtrain ", f"{' '.join(LLMTRAIN)} ", command)
    return output_of("bash", "-ec", line, cwd=folder, PYTHONPATH=str(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_the_command_line_of_the_page(kind, tmp_path):
    publish(tmp_path / "published", kind)
    stories = [
        f"the quick brown fox jumps over a lazy dog {i % 7} times, and the dog sleeps on. " * 40 for i in range(60)
    ]
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(stories[:50]):
        (tmp_path / "texts" / f"{i}.txt").write_text(text)
    (tmp_path / "held-out.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in stories[50:]))
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    for language, text in blocks:
        if language == "yaml":
            (tmp_path / text.partition("\n")[0].removeprefix("# ")).write_text(text)
    (line,) = [text.removeprefix("$ ") for language, text in blocks if language == "console"]
    shell(tmp_path, line)

    before, after = (open_hf_checkpoint(tmp_path / name) for name in ("published", "exported"))
    assert set(before) == set(after) and all(before.shape(name) == after.shape(name) for name in before)
    assert not torch.equal(before[max(before)], after[max(before)])
    assert after.config["architectures"] == before.config["architectures"] and after.config["vocab_size"] == VOCAB
    results = json.loads((tmp_path / "results" / "further" / "results.json").read_text())["results"]
    perplexity = {one["model"]: one["value"] for one in results}
    assert perplexity["further"] < perplexity["weights"]
    chat, tokenizer = [{"role": "user", "content": "the quick"}], AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>the quick\n"

    shell(tmp_path, "llmtrain export further trimmed --trim-vocab")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "trimmed")
    ids = torch.tensor([tokenizer.encode("the quick brown fox")])
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")(ids).logits
        torch.testing.assert_close(model(ids).logits, whole[..., :270])
