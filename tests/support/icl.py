"""Tokenizers of three kinds, a stand-in for a model, and paths of the public task files."""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmtrain.data.tokenize.tokenizer import TextTokenizer, make_tokenizer, train_bpe
from llmtrain.eval.prompts.requests import GeneratedText, Loglikelihood, LoglikelihoodRequest, Request, Response

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
"""Public data sets beside the checkout; tests that need them are skipped without."""

WORDS = """
    the of and to in a is that it was for on are as with his they at be this from have or by one had not but what
    all were when we there can an your which their said if do will each about how up out them then she many some
    so these would other into has more her two like him see time could no make than first been its who now people
    my made over did down only way find use may water long little very after words called just where most know
    question answer passage
""".split()  # noqa: SIM905


def icl_file(name: str) -> Path:
    """shared/data/icl/NAME.jsonl, or of a task that is there only as a sample, NAME_small.jsonl."""
    for file in (SHARED / "icl" / f"{name}.jsonl", SHARED / "icl" / f"{name}_small.jsonl"):
        if file.exists():
            return file
    pytest.skip(f"needs {SHARED / 'icl'}, public data sets that are not part of the project")


def some_sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)).capitalize()


def byte_level(bos: bool = False) -> TextTokenizer:
    """GPT-2's kind; with bos, one that begins every text with <s>, as Llama 3's does."""
    rng = random.Random(0)
    text = [f"{some_sentence(rng, 12)}. Question: {some_sentence(rng, 5)}?\nAnswer:" for _ in range(400)]
    made = train_bpe(text, 600)
    if not bos:
        return made
    backend = made.backend
    backend.add_special_tokens(["<s>"])
    backend.post_processor = bos_processor(backend)
    return make_tokenizer(backend, made.eod_token, made.config | {"bos_token": "<s>"})


def bos_processor(backend: Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )


def sentence_piece() -> TextTokenizer:
    """Llama 2's kind: a space before the text, words with the space as their first character, BOS."""
    rng = random.Random(0)
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    split = pre_tokenizers.Split("▁", "merged_with_next")
    backend.pre_tokenizer = split  # for training only: merges within words
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    backend.train_from_iterator([some_sentence(rng, 12) + ". Question: Answer:" for _ in range(400)], trainer)
    backend.post_processor = bos_processor(backend)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    return make_tokenizer(backend, "</s>", config)


TOKENIZERS = {"byte_level": byte_level, "with_bos": lambda: byte_level(bos=True), "sentence_piece": sentence_piece}


def score(context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """(log-likelihood, greedy): a pseudo-random function of the tokens."""
    digest = hashlib.blake2b(repr((list(context), list(continuation))).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    return -(0.5 + 3 * (number % 10_007) / 10_007) * len(continuation), number % 3 == 0


def generate(context: Sequence[int]) -> str:
    """Generated text: a pseudo-random function of the tokens, often a number, seldom one after ####."""
    number = score(context, [0])[0] * -1e6
    choice = int(number) % 5
    texts = (
        f" the {int(number) % 97}",
        f"x = {int(number) % 9},\n#### {int(number) % 9}",
        "",
        f"-3.{int(number) % 9}.",
    )
    return texts[choice] if choice < 4 else " The Mark, and more"


def ask(requests: Sequence[Request]) -> list[Response]:
    """Responses of the stand-in."""
    results: list[Response] = []
    for request in requests:
        if isinstance(request, LoglikelihoodRequest):
            likelihood, greedy = score(request.context, request.continuation)
            results.append(Loglikelihood(likelihood, greedy, len(request.continuation)))
        else:
            text = generate(request.context)
            for stop in request.stops:
                text = text.split(stop)[0]
            results.append(GeneratedText(text))
    return results
