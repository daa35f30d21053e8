"""Engines that tokenize: whatever an engine does not do exactly as `tokenizers`, it refuses, or is found out."""

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmtrain.data.prepare import PrepareError, prepare
from llmtrain.data.shards.packing import bytes_per_token
from llmtrain.data.sources.records import Pieces
from llmtrain.data.tokenize import engine_choice
from llmtrain.data.tokenize.encode import DocumentMarks, Encoder
from llmtrain.data.tokenize.engine_choice import (
    ByteSizes,
    EngineChoice,
    VerifiedTokenizer,
    adversarial_texts,
    choose_engine,
    sizes_agree,
)
from llmtrain.data.tokenize.engines import ENGINES, EngineError, TokenizersEngine, load_exact
from llmtrain.errors import RunError
from tests.support.prepared import digests
from tests.unit.data.conftest import some_text

GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<|endoftext|>", "<|start|>"]


def byte_level(*pattern: str, **options) -> Tokenizer:
    """A byte-level BPE, with GPT-2's pattern or another."""
    tokenizer = Tokenizer(models.BPE(**options))
    cut = [pre_tokenizers.Split(Regex(one), "isolated") for one in pattern]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, bytes_]) if cut else bytes_
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def normalized() -> Tokenizer:
    tokenizer = byte_level(GPT4)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def trimmed() -> Tokenizer:
    tokenizer = byte_level(r".{3}|.|\n")  # tokens that end with spaces
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


KINDS = {
    "GPT-2": byte_level,
    "Llama 3": lambda: byte_level(GPT4, ignore_merges=True),
    "GPT-4": lambda: byte_level(GPT4),
    "another pattern": lambda: byte_level(r"\p{N}|\p{L}+|[^\p{L}\p{N}]+"),
    "two patterns": lambda: byte_level(r"\p{N}", GPT4),
    "a prefix of a space": lambda: _with_prefix(),
    "a normalizer": normalized,
    "offsets that are trimmed": trimmed,
    "SentencePiece": sentencepiece,
}


def _with_prefix() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def train(tokenizer: Tokenizer, added: str = "") -> str:
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[
            *SPECIAL,
            "<unk>",
            *(f"<0x{byte:02X}>" for byte in range(256) if tokenizer.model.byte_fallback),
        ],
        initial_alphabet=[] if tokenizer.model.byte_fallback else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([some_text(seed, 200) for seed in range(10)], trainer)
    if added:
        tokenizer.add_tokens([AddedToken(added, normalized=False)])
    return tokenizer.to_str()


@pytest.fixture(scope="module")
def trained() -> dict[str, str]:
    return {name: train(make()) for name, make in KINDS.items()} | {"added tokens": train(byte_level(), "fox jumps")}


def texts(count: int = 60) -> list[str]:
    rng = random.Random(5)
    ranges = [
        (0x20, 0x7F),
        (0, 0x20),
        (0xA0, 0x250),
        (0x300, 0x370),
        (0x600, 0x700),
        (0x4E00, 0x4F00),
        (0x1F300, 0x1FAFF),
    ]

    def character() -> str:
        return chr(rng.randrange(*rng.choice(ranges)))

    strange = ["".join(character() for _ in range(rng.randrange(1, 80))) for _ in range(count)]
    return strange + [some_text(seed, 50) + SPECIAL[seed % 2] + some_text(seed, 3) for seed in range(10)]


@pytest.mark.parametrize("kind", [*KINDS, "added tokens"])
@pytest.mark.parametrize("name", ["gigatoken", "tiktoken"])
def test_an_engine_is_equal_or_refuses_or_is_found_out(trained, name, kind):
    pytest.importorskip(name)
    settings, sample = trained[kind], [some_text(1, 500), *texts(10)]
    try:
        choice = choose_engine(name, settings, sample)
    except EngineError:
        if kind in ("GPT-2", "GPT-4", "Llama 3"):  # known to both
            raise
        return
    exact = load_exact(settings)
    for text, ids in zip(texts(), ENGINES[choice.name](settings).encode(texts()), strict=True):
        assert ids.tolist() == exact.encode(text, add_special_tokens=False).ids, text
    assert name in choice.note


@pytest.mark.parametrize("kind", ["GPT-2", "Llama 3", "offsets that are trimmed", "a normalizer", "SentencePiece"])
def test_the_bytes_behind_tokens_are_those_of_the_offsets(trained, kind):
    """Whatever ByteSizes does not know, it leaves to the offsets."""
    settings, known = trained[kind], 0
    sample = adversarial_texts(settings, texts())
    agree = sizes_agree(settings, sample)
    assert agree == (kind not in ("a normalizer", "SentencePiece"))
    engine = VerifiedTokenizer(settings, EngineChoice("tokenizers", sizes=agree))
    for text in [*texts(), *sample]:
        encoding = load_exact(settings).encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int64)
        found = engine.sizes(ids, text)
        assert found.tolist() == bytes_per_token(text, encoding.offsets).tolist()
        assert found.sum() == len(text.encode())
        known += agree and ByteSizes(settings)(ids, text.encode()) is not None
    assert known > 50 or not agree


class Faulty(TokenizersEngine):
    """An engine that reads a special token that is spelled out, or fails."""

    def encode(self, texts):
        for text, ids in zip(texts, super().encode(texts), strict=True):
            yield ids[:-1] if SPECIAL[0] in text else ids


class Failing(TokenizersEngine):
    def encode(self, texts):
        raise BaseException("a panic\nand more")  # as PyO3's PanicException


@pytest.mark.parametrize("faulty, said", [(Faulty, "other tokens"), (Failing, "a panic")])
def test_a_faulty_engine_is_named_and_not_used(trained, monkeypatch, faulty, said):
    monkeypatch.setattr(engine_choice, "ENGINES", {"gigatoken": faulty, "tokenizers": TokenizersEngine})
    choice = choose_engine("auto", trained["GPT-2"], ["plain text without any special token"])
    assert choice.name == "tokenizers"
    assert "gigatoken" in choice.note and said in choice.note
    with pytest.raises(EngineError, match=said):
        choose_engine("gigatoken", trained["GPT-2"], [])


def test_an_engine_is_compared_again_during_the_run(trained, monkeypatch):
    monkeypatch.setitem(engine_choice.ENGINES, "gigatoken", Faulty)
    monkeypatch.setattr(engine_choice, "_PROVED_EVERY", 1000)
    encoder = Encoder(trained["GPT-2"], DocumentMarks(0), 17, 0.0, EngineChoice("gigatoken"))
    encoder([Pieces("a", ["plain " * 100], [0], [0])])
    with pytest.raises(RunError, match="--tokenizer-engine tokenizers"):
        encoder([Pieces("a", ["some <|endoftext|> " * 100], [1], [9])])


def test_text_is_cut_alike_for_every_engine(trained):
    """The cut of a long text is the encoder's, not the engine's."""
    pieces = Pieces("a", ["short", "naïve fox 走 " * 300_000, "behind"], [0, 1, 2], [0, 9, 99])
    batches = []
    for name in ("tokenizers", "gigatoken", "tiktoken"):
        if name != "tokenizers":
            pytest.importorskip(name)
        batches.append(Encoder(trained["Llama 3"], DocumentMarks(0), 17, 0.0, EngineChoice(name))([pieces]))
    assert all(np.array_equal(batches[0].ids, batch.ids) for batch in batches)
    assert all(batch.tokens.sum() == len(batch.ids) and len(batch.tokens) == 3 for batch in batches)


def test_shards_are_the_same_with_any_engine(corpus, records, settings, tmp_path):
    folders = []
    for name in ("tokenizers", "gigatoken", "tiktoken"):
        if name != "tokenizers":
            pytest.importorskip(name)
        out = tmp_path / name
        sources = [str(corpus), str(records)]
        folders.append(digests(prepare(settings(corpus, sources=sources, out=str(out), tokenizer_engine=name)).out))
    assert all(folder == folders[0] for folder in folders)


def test_an_engine_that_is_asked_for_by_name_must_serve(corpus, settings, tmp_path):
    file = tmp_path / "tokenizer.json"
    content = json.loads(train(byte_level()))
    content["pre_tokenizer"] = {"type": "Whitespace"}
    file.write_text(json.dumps(content))
    config = settings(corpus, vocab_size=None, tokenizer=str(file), tokenizer_engine="tiktoken")
    with pytest.raises(PrepareError, match="tokenizer_engine: tiktoken"):
        prepare(config)
