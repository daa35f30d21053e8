"""A mixer with neither cache nor prefix form trains, decodes and is scored as a full forward pass would."""

import logging

import pytest
import torch

from llmtrain.eval.scoring.scorer import HybridScorer
from llmtrain.generate.decoding import decode
from llmtrain.generate.sampling import Sampling
from llmtrain.kernels import platform
from llmtrain.models.backends import backend_problems, servable
from llmtrain.models.mixers import replay
from llmtrain.schema.training import ActivationCheckpointing
from llmtrain.train.parallel import checkpoint_activations
from tests.support import gated_conv
from tests.support.checkpoints import tokenizer
from tests.support.models import VOCAB
from tests.support.packing import apart, assert_same, packed_batch, together
from tests.support.scoring import KINDS, assert_same_scores, score_one_by_one

GREEDY = Sampling(temperature=0)


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("layers", ["g*2", "g a g"])
def test_decoding_equals_the_full_forward(layers, caplog):
    model, prompt = gated_conv.build(layers), text(23)
    replay._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        new = [int(step[0] or 0) for step in decode(model, [prompt], GREEDY, max_new_tokens=60)]
    with torch.no_grad():
        logits = model.logits(torch.tensor([prompt + new]))[0, len(prompt) - 1 : -1]
    assert new == logits.argmax(dim=-1).tolist()
    assert [r.message for r in caplog.records] == [
        "GatedConv has no cache for decoding: for each new token it reads the whole text again"
    ]


def test_prompts_of_different_lengths_decode_as_if_alone(monkeypatch):
    model = gated_conv.build()
    prompts = [text(length, seed=length) for length in (23, 1, 40, 7)]
    alone = [[step[0] for step in decode(model, [p], GREEDY, max_new_tokens=12)] for p in prompts]
    batched = list(zip(*decode(model, prompts, GREEDY, max_new_tokens=12), strict=True))
    assert [list(row) for row in batched] == alone
    monkeypatch.setattr("llmtrain.generate.decoding.PREFILL_TOKENS", 80)  # two rows at a time
    assert list(zip(*decode(model, prompts, GREEDY, max_new_tokens=12), strict=True)) == batched


def test_a_prefix_read_once_goes_on_several_ways():
    model, prefix, ways = gated_conv.build(), text(20), [text(9, seed=1), text(9, seed=2)]
    with torch.no_grad():
        cache = model.empty_cache(1, 20)
        model.fill(torch.tensor([prefix]), cache)
        found = model.next_logits(torch.tensor(ways), cache.take(torch.tensor([0, 0]), 40))
        expected = model.logits(torch.tensor([prefix + way for way in ways]))[:, -1]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_requests_are_scored_without_shared_prefixes():
    model, requests = gated_conv.build(), KINDS["all"]()
    scorer = HybridScorer(model, tokenizer())
    assert not scorer.share and not scorer.packed
    assert_same_scores(scorer.loglikelihood(requests), score_one_by_one(model.logits, requests))
    assert "no form for packed requests" in (model.hybrid.prefix_refusal() or "")


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
def test_documents_and_checkpointing(kind):
    batch = packed_batch()
    expected = apart(gated_conv.build(), batch)
    model = gated_conv.build(documents=True)
    checkpoint_activations(model.hybrid, ActivationCheckpointing(type=kind))
    found = {name.replace("_checkpoint_wrapped_module.", ""): t for name, t in together(model, batch).items()}
    assert_same(found, expected)


def test_a_block_without_backends_has_nothing_to_check():
    config = gated_conv.build().config
    assert list(backend_problems(config)) == []
    assert servable(config, platform.cpu(), "float32").blocks["g"] == config.blocks["g"]
