"""Drawing tokens: the rules of transformers, and draws that depend on the row alone."""

from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from llmtrain.generate.sampling import Sampler, Sampling, probabilities, sample_inverse_cdf

VOCAB = 50


def logits(rows: int = 4, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def sampler(options: Sampling, rows: int = 4, row_numbers: list[int] | None = None, draws: int = 5) -> Sampler:
    prompts = [[1, 2, 3 + row] for row in range(rows)]
    return Sampler(
        options, prompts, row_numbers or list(range(rows)), vocab_size=VOCAB, draws=draws, device=torch.device("cpu")
    )


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 1e-320])
def test_at_the_least_temperatures_the_likeliest_token_is_certain(temperature):
    found = probabilities(logits(), Sampling(temperature=temperature))
    assert torch.equal(found.argmax(1), logits().argmax(1)) and bool((found.max(1).values == 1).all())


def test_the_least_penalty_leaves_a_distribution():
    made = sampler(Sampling(repetition_penalty=1e-38, seed=1))
    assert made.seen is not None
    tokens = made(logits(), 0)
    assert bool((logits().gather(1, tokens[:, None]) > 0).all()), (
        "a token of the prompt that the penalty has made certain"
    )


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 1, 7, VOCAB, 1000])
@pytest.mark.parametrize("top_p", [None, 1e-6, 0.5, 0.95, 1.0])
def test_cutting_off_agrees_with_transformers(temperature, top_k, top_p):
    ids: Any = None  # these rules do not look at the text so far
    theirs: Any = TemperatureLogitsWarper(temperature)(ids, logits())
    if top_k is not None:
        theirs = TopKLogitsWarper(top_k)(ids, theirs)
    if top_p is not None:
        theirs = TopPLogitsWarper(top_p)(ids, theirs)
    ours = probabilities(logits(), Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(ours, theirs.softmax(dim=-1))


def test_repetition_penalty_agrees_with_transformers_and_follows_what_was_drawn():
    options = Sampling(temperature=0, repetition_penalty=5.0)
    ours = sampler(options)
    history: Any = torch.tensor([[1, 2, 3 + row] for row in range(4)])
    for draw in range(5):
        scores = logits(seed=draw // 2)  # the same again: a token just drawn must lose
        expected = RepetitionPenaltyLogitsProcessor(5.0)(history, scores.clone()).argmax(dim=-1)
        tokens = ours(scores, draw)
        assert tokens.tolist() == expected.tolist()
        history = torch.cat((history, tokens[:, None]), dim=1)
    assert history[0, 3] != history[0, 4]


def test_greedy_takes_the_likeliest_and_needs_no_seed():
    assert sampler(Sampling(temperature=0))(logits(), 0).tolist() == logits().argmax(dim=-1).tolist()


def test_a_rows_draws_do_not_depend_on_the_rows_beside_it():
    options = Sampling(seed=3)
    together = sampler(options)
    tokens = torch.stack([together(logits(seed=draw), draw) for draw in range(5)])
    alone = sampler(options, rows=1, row_numbers=[2])
    assert tokens[:, 2].tolist() == [int(alone(logits(seed=draw)[2:3], draw)) for draw in range(5)]


def test_seeds_and_rows_draw_differently_and_the_same_seed_alike():
    same = torch.zeros(8, VOCAB)
    first, again, other = (sampler(Sampling(seed=seed), rows=8) for seed in (0, 0, 1))
    assert first(same, 0).tolist() == again(same, 0).tolist()
    assert len(set(first(same, 1).tolist())) > 1
    assert not torch.equal(first.uniform, other.uniform)


def test_draws_follow_the_distribution():
    probability = torch.tensor([[0.5, 0.0, 0.2, 0.3, 0.0]]).expand(20_000, -1)
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = sample_inverse_cdf(probability, uniform).bincount(minlength=5) / 20_000
    assert share[1] == share[4] == 0
    assert (share - probability[0]).abs().max() < 0.015


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_interval_never_give_a_token_of_probability_zero(uniform):
    probability = torch.tensor([[0.0, 0.25, 0.75, 0.0]])
    assert int(sample_inverse_cdf(probability, torch.tensor([uniform], dtype=torch.float64))) in (1, 2)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.5}, {"repetition_penalty": 0}, {"seed": -1}]
)
def test_values_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} = .*must be"):
        Sampling(**wrong)
