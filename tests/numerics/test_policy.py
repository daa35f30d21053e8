"""A hybrid learns by rewards alone: rollouts by the engine on the weights that are trained, advantages, losses of a policy."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.generate.engine import Engine, Request
from llmtrain.generate.sampling import Sampling
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.objectives.policy.losses import PolicyLoss, advantages, is_clipped, reduced, token_losses
from tests.support.models import VOCAB, build

GROUP, PROMPTS, NEW = 6, 4, 8


def rollout(engine: Engine, step: int) -> list[Request]:
    """Groups of answers to prompts that share a beginning of two pieces."""
    common = list(range(8))
    return engine.run(
        Request([*common, 10 + prompt, step % VOCAB], NEW, Sampling(seed=step), number=prompt * GROUP + number)
        for prompt in range(PROMPTS)
        for number in range(GROUP)
    )


def log_likelihoods(model: CausalLM, requests: list[Request]) -> Tensor:
    """[answers, NEW], with gradient."""
    ids = torch.tensor([[*request.prompt, *request.ids] for request in requests])
    logits = model.logits(ids)[:, -NEW - 1 : -1]
    return -F.cross_entropy(logits.transpose(1, 2), ids[:, -NEW:], reduction="none")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("sign", "shuffled", "least", "most"), [(1, False, 0.8, 1.0), (1, True, 0.3, 0.7), (-1, False, 0.0, 0.2)]
)
def test_a_hybrid_learns_by_rewards_of_its_own_answers_alone(sign, shuffled, least, most):
    """Neither by rewards of other answers of the group, nor by advantages of the other sign."""
    model = build("zamba2 as the 1.2B", platform.cpu(), layers="m s+m")
    engine = Engine(model, rows=GROUP * PROMPTS, max_len=24, piece=4, prefix_bytes=1 << 22)
    optimizer, to = torch.optim.Adam(model.parameters(), lr=2e-2), PolicyLoss("dapo")
    mask = torch.ones(GROUP * PROMPTS, NEW)
    means = []
    torch.manual_seed(0)
    for step in range(16):
        engine.weights_changed()
        requests = rollout(engine, step)
        rewards = torch.tensor([sum(one % 2 == 0 for one in request.ids) / NEW for request in requests])
        means.append(float(rewards.mean()))
        drawn = torch.tensor([[token.log_likelihood for token in request.tokens] for request in requests])
        log_p = log_likelihoods(model, requests)
        # No second engine, no copy of the weights: what was drawn is on the policy to rounding.
        torch.testing.assert_close(drawn, log_p.detach(), atol=1e-5, rtol=1e-5)
        of_groups = rewards.view(PROMPTS, GROUP)
        advantage = sign * advantages(of_groups[:, torch.randperm(GROUP)] if shuffled else of_groups)[0].flatten()
        assert not is_clipped(to, log_p, drawn, mask, advantage).any()
        loss = reduced(to, token_losses(to, log_p, drawn, mask, advantage), mask, len(requests), mask.numel())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert engine.prefixes is not None and engine.prefixes.reused_tokens == 16 * (PROMPTS - 1) * 8
    assert 0.4 < means[0] < 0.6 and least <= sum(means[-3:]) / 3 <= most, means
