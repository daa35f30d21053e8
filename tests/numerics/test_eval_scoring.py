"""Log-likelihoods against one plain forward pass per request, with sharing, batching and truncation."""

import pytest
import torch

from benchmarks.harness.plan_work import work
from llmtrain.eval.prompts.requests import LoglikelihoodRequest
from llmtrain.eval.scoring.batching import Limits
from llmtrain.eval.scoring.scorer import HybridScorer
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from tests.support.checkpoints import tokenizer
from tests.support.models import MODELS, VOCAB, build
from tests.support.scoring import KINDS, Text, assert_same_scores, choices, letters, score_one_by_one

FEW = ("mpt with alibi", "zamba2 as the 1.2B")


@pytest.fixture(params=MODELS, scope="module")
def model(request) -> CausalLM:
    return build(request.param, platform.cpu())


def scorer(model: CausalLM, call_cost: int = 4, **options) -> HybridScorer:
    """call_cost: so low that a few requests are worth sharing, cutting and splitting."""
    made = HybridScorer(model, tokenizer(), **options)
    limits = made.limits
    made.limits = Limits(limits.tokens, call_cost, limits.row_bytes, limits.token_bytes, limits.cache_bytes)
    return made


@pytest.mark.parametrize(
    ("model", "kind"),
    [(name, kind) for name in MODELS for kind in KINDS if name in FEW or kind == "all"],
    indirect=["model"],
)
def test_scores_are_those_of_a_forward_pass_per_request(model, kind):
    requests = KINDS[kind]()
    expected = score_one_by_one(model.logits, requests)
    assert len({round(score.log_likelihood, 4) for score in expected}) > len(requests) // 2
    assert_same_scores(scorer(model).loglikelihood(requests), expected)
    assert_same_scores(scorer(model, max_batch_tokens=50).loglikelihood(requests), expected)
    assert_same_scores(scorer(model, share=False).loglikelihood(requests), expected)


@pytest.mark.parametrize("model", FEW, indirect=True)
def test_some_continuations_are_greedy(model):
    """Continuations of greedy decoding; random ones are hardly ever greedy."""
    text = Text(5)
    requests = []
    for document in range(8):
        context = list(text(2, 30))
        ids = list(context)
        for _ in range(5):
            with torch.no_grad():
                ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
        found = tuple(ids[len(context) :])
        requests += [
            LoglikelihoodRequest(document, 0, tuple(context), found),
            LoglikelihoodRequest(document, 1, tuple(context), (*found[:-1], (found[-1] + 1) % VOCAB)),
            LoglikelihoodRequest(document, 2, tuple(context), found[:1]),
        ]
    expected = score_one_by_one(model.logits, requests)
    assert [score.greedy for score in expected] == [True, False, True] * 8
    assert_same_scores(scorer(model).loglikelihood(requests), expected)


@pytest.mark.parametrize("window", [9, 33])
@pytest.mark.parametrize("model", FEW, indirect=True)
def test_contexts_lose_their_left_end_to_the_window(model, window):
    requests = [*choices(6, shots=40), *letters(6)]
    found = scorer(model, max_length=window).loglikelihood(requests)
    assert_same_scores(found, score_one_by_one(model.logits, requests, window))
    assert sum(score.truncated > 0 for score in found) > 10
    assert_same_scores(scorer(model).loglikelihood(requests, window=window), found)


def test_prefixes_and_tails_together_stay_within_learned_positions():
    """The longest prefix beside the longest suffix would be 500 tokens of 300."""
    model = build("mpt with learned positions and clipping", platform.cpu())
    text = Text(0)
    contexts = [text(250), text(250), text(20), text(20)]
    suffixes = [text(3), text(4), text(250), text(249)]
    requests = [
        LoglikelihoodRequest(document, option, context, (option, *suffix))
        for document, (context, suffix) in enumerate(zip(contexts, suffixes, strict=True))
        for option in range(4)
    ]
    made = scorer(model)
    made.limits = Limits(10**6, 500)  # all in one batch, were it not for the window
    assert_same_scores(made.loglikelihood(requests), score_one_by_one(model.logits, requests))
    assert work(made.plan).tokens < 0.7 * sum(row.length for row in made.plan.rows)
