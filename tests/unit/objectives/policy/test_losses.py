"""Losses of a policy beside TRL 1.16's own code on the same rollouts, and their edges."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from llmtrain.objectives.policy import losses as ours
from llmtrain.objectives.policy.losses import PolicyLoss, advantages, importance_weights, reduced, token_losses

ANSWERS, T, MOST = 6, 9, 12


def rollouts(seed: int = 0) -> dict[str, Tensor]:
    """Answers of unequal lengths, scored some steps ago."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(ANSWERS, T, generator=generator, dtype=torch.float64)

    log_p = -noise(1.0).abs() - 0.1
    lengths = torch.randint(1, T + 1, (ANSWERS,), generator=generator)
    mask = (torch.arange(T) < lengths[:, None]).long()
    rewards = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    return {
        "log_p": log_p,
        "old": log_p + noise(0.3),
        "reference": log_p + noise(0.4),
        "sampled": log_p + noise(0.2),
        "mask": mask,
        "advantage": advantages(rewards)[0].flatten(),
    }


def theirs(of: dict[str, Tensor], to: PolicyLoss, step_tokens: int, importance: Tensor | None) -> tuple[float, Tensor]:
    """(loss, its gradient by log_p) of GRPOTrainer._compute_loss, given the log-probabilities."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    log_p = of["log_p"].clone().requires_grad_()
    itself = MagicMock()
    itself.configure_mock(
        loss_type="grpo" if to.name == "gspo" else to.name,
        importance_sampling_level="sequence" if to.name == "gspo" else "token",
        epsilon_low=to.clip_low,
        epsilon_high=to.clip_high,
        beta=to.beta,
        max_completion_length=to.max_new_tokens,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=importance is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=to.kl_ratio, steps_per_generation=1),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (log_p, torch.zeros_like(log_p), None),
    )
    itself.model.training = True
    inputs: dict[str, Any] = {
        "prompt_ids": torch.zeros(ANSWERS, 1, dtype=torch.long),
        "prompt_mask": torch.ones(ANSWERS, 1, dtype=torch.long),
        "completion_ids": torch.zeros(ANSWERS, T, dtype=torch.long),
        "completion_mask": of["mask"],
        "advantages": of["advantage"],
        "old_per_token_logps": of["old"],
        "ref_per_token_logps": of["reference"],
        "num_items_in_batch": torch.tensor(float(step_tokens)),
        "importance_sampling_ratio": importance,
    }
    loss = GRPOTrainer._compute_loss(itself, itself.model, inputs)
    loss.backward()
    assert log_p.grad is not None
    return loss.item(), log_p.grad


CASES = [
    *(PolicyLoss(name, max_new_tokens=MOST) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "gspo")),
    PolicyLoss("dapo", clip_high=0.28),
    PolicyLoss("grpo", beta=0.04, kl_ratio=False),
    PolicyLoss("dapo", beta=0.1),
    PolicyLoss("gspo", clip_low=3e-2, clip_high=4e-2, beta=0.1),
]


@pytest.mark.ci
@pytest.mark.parametrize("with_importance", [False, True])
@pytest.mark.parametrize("to", CASES, ids=str)
def test_losses_and_gradients_equal_trl(to, with_importance):
    of = rollouts()
    importance = importance_weights(of["old"], of["sampled"], of["mask"], "token_truncate") if with_importance else None
    tokens = 2 * int(of["mask"].sum())  # this microbatch has half of the step's
    expected, gradient = theirs(of, to, tokens, importance)
    log_p = of["log_p"].clone().requires_grad_()
    losses = token_losses(to, log_p, of["old"], of["mask"], of["advantage"], of["reference"], importance)
    loss = reduced(to, losses, of["mask"], ANSWERS, tokens)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-5) and expected != 0
    assert log_p.grad is not None
    torch.testing.assert_close(log_p.grad, gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_microbatches_of_any_size_add_up_to_the_step(name):
    of, to = rollouts(1), PolicyLoss(name, max_new_tokens=MOST)

    def part(rows: slice) -> Tensor:
        own = {key: value[rows] for key, value in of.items()}
        losses = token_losses(to, own["log_p"], own["old"], own["mask"], own["advantage"])
        return reduced(to, losses, own["mask"], ANSWERS, int(of["mask"].sum()))

    whole = part(slice(None))
    torch.testing.assert_close(part(slice(0, 1)) + part(slice(1, 4)) + part(slice(4, None)), whole)


def test_advantages_by_their_definitions():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [0.0, torch.nan, 1.0, 0.0]])
    found = {scale: advantages(rewards, scale) for scale in ("group", "group_biased", "batch", "none")}
    half = 0.5
    torch.testing.assert_close(found["none"][0][0], torch.tensor([half, -half, -half, half]))
    torch.testing.assert_close(found["group_biased"][0][0, 0], torch.tensor(half / (half + 1e-4)))
    torch.testing.assert_close(found["group"][0][0, 0], torch.tensor(half / ((1 / 3) ** 0.5 + 1e-4)))
    torch.testing.assert_close(found["batch"][0][0, 0], half / (rewards[:2].std() + 1e-4))
    for made, valid in found.values():
        assert made[1:].eq(0).all() and valid.all(dim=1).tolist() == [True, True, False]
    assert advantages(torch.tensor([[3.0]]))[0].item() == 0, "a group of one has nothing to compare"


def test_importance_weights_are_bounded_and_ignore_what_is_unknown():
    old = torch.tensor([[0.0, 2.0, 1.0], [-1.0, -1.0, 5.0]])
    sampled = torch.tensor([[0.0, 0.0, torch.nan], [-0.5, -1.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    e = torch.e
    expected = {
        "token_truncate": [[1, 3, 1], [e**-0.5, 1, 1]],
        "token_mask": [[1, 0, 1], [e**-0.5, 1, 1]],
        "sequence_truncate": [[3], [e**-0.5]],
        "sequence_mask": [[0], [e**-0.5]],
    }
    for mode, weights in expected.items():
        torch.testing.assert_close(importance_weights(old, sampled, mask, mode), torch.tensor(weights))  # type: ignore[arg-type]


def test_estimators_of_the_divergence_agree_in_the_mean():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0) for _ in "pq")
    true = (p.exp() * (p - q)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * ours.divergence(p, q, estimator)).sum(), true)
    near = (p + 1e-3 * torch.randn(5, generator=generator, dtype=torch.float64)).log_softmax(0)
    true = (p.exp() * (p - near)).sum()
    torch.testing.assert_close((p.exp() * ours.divergence(p, near, "k2")).sum(), true, rtol=1e-2, atol=0)


def test_the_tokens_that_are_clipped():
    log_p, old = torch.tensor([[0.5, 0.0, 0.0], [-0.5, 0.0, 9.0]]), torch.zeros(2, 3)
    mask, advantage = torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.tensor([1.0, -1.0])
    found = {name: ours.is_clipped(PolicyLoss(name), log_p, old, mask, advantage).tolist() for name in ("dapo", "gspo")}
    assert found["dapo"] == [[True, False, False], [True, False, False]]
    assert found["gspo"] == [[False, False, False], [True, True, False]]
