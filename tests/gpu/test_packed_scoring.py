"""Log-likelihoods of packed prefix trees on a GPU against one forward pass per request."""

import pytest

from benchmarks.harness.plan_work import work
from llmtrain.eval.scoring.packed_plan import PackedPlan
from llmtrain.eval.scoring.scorer import HybridScorer
from llmtrain.kernels import platform
from tests.support.checkpoints import tokenizer
from tests.support.models import PACKABLE, build
from tests.support.scoring import KINDS, assert_same_scores, score_one_by_one

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", PACKABLE)
def test_scores_in_fp32(name):
    model = build(name, platform.detect())
    requests = KINDS["all"]()
    expected = score_one_by_one(lambda ids: model.logits(ids.cuda()).cpu(), requests)
    for tokens in (None, 300):
        made = HybridScorer(model, tokenizer(), max_batch_tokens=tokens)
        assert_same_scores(made.loglikelihood(requests), expected, tolerance=1e-4)
        assert isinstance(made.plan, PackedPlan) and (work(made.plan).calls == 1) == (tokens is None)
