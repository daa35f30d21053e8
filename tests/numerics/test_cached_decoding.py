"""Reading on from a cache says what a full forward pass says, for every kind of layer and any padding."""

import pytest
import torch
from torch import Tensor

from llmtrain.generate.decoding import decode
from llmtrain.generate.sampling import Sampler, Sampling
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from tests.support.models import MODELS, VOCAB, build


@pytest.fixture(params=MODELS, scope="module")
def model(request) -> CausalLM:
    return build(request.param, platform.cpu())


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def full(model: CausalLM, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model.logits(torch.tensor([ids]))[0]


@pytest.mark.parametrize(
    "options",
    [pytest.param(Sampling(temperature=0), marks=pytest.mark.ci), Sampling(seed=7, top_p=0.99, repetition_penalty=1.3)],
)
def test_decoding_equals_the_full_forward_over_256_tokens(model, options):
    prompt = text(37)
    new = [int(step[0] or 0) for step in decode(model, [prompt], options, max_new_tokens=256)]
    sampler = Sampler(options, [prompt], [0], vocab_size=VOCAB, draws=256, device=torch.device("cpu"))
    logits = full(model, prompt + new)[len(prompt) - 1 :]
    assert new == [int(sampler(logits[draw : draw + 1], draw)) for draw in range(256)]
    assert options.temperature == 0 or len(set(new)) > 20


def test_logits_agree_token_by_token(model):
    ids = text(60)
    cache = model.empty_cache(1, 60)
    with torch.no_grad():
        steps = [model.next_logits(torch.tensor([ids[:21]]), cache)]
        steps += [model.next_logits(torch.tensor([[token]]), cache) for token in ids[21:]]
    torch.testing.assert_close(torch.cat(steps), full(model, ids)[20:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("cuts", [(1, 2, 40), (17, 18, 33), (16, 32)])
def test_reading_in_pieces_of_any_length(model, cuts):
    """A prefix read once, and continued by more than one token."""
    ids, cache, start = text(50), model.empty_cache(1, 50), 0
    expected = full(model, ids)
    for end in (*cuts, 50):
        with torch.no_grad():
            logits = model.next_logits(torch.tensor([ids[start:end]]), cache)
        torch.testing.assert_close(logits[0], expected[end - 1], atol=2e-5, rtol=1e-4)
        start = end


def test_a_prefix_read_once_goes_on_several_ways(model):
    """Labelled tokens are scored as the full forward scores them; rows may end apart, padded on the right."""
    prefix, ways = text(20), [text(9, seed=1), text(14, seed=2)]
    cache = model.empty_cache(1, 20)
    with torch.no_grad():
        model.fill(torch.tensor([prefix]), cache)
        ids = torch.tensor([[*way, *[0] * (14 - len(way))] for way in ways])
        labels = ids.roll(-1, dims=1)
        labels[0, 8:] = labels[1, 13:] = -100
        scores = model.scores(ids, labels, cache.take(torch.tensor([0, 0]), 40))
    for row, way in enumerate(ways):
        logits = full(model, prefix + way)[20:-1]
        expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(way[1:])[:, None])[:, 0]
        torch.testing.assert_close(scores.log_likelihood[row, : len(way) - 1], expected, atol=2e-5, rtol=1e-4)
        assert scores.log_likelihood[row, len(way) - 1 :].abs().sum() == 0
        assert scores.greedy[row, : len(way) - 1].tolist() == (logits.argmax(dim=-1) == torch.tensor(way[1:])).tolist()


def test_prompts_of_different_lengths_decode_as_if_alone(model, monkeypatch):
    prompts = [text(length, seed=length) for length in (23, 1, 40, 7, 39)]
    alone = [
        [s[0] for s in decode(model, [p], Sampling(seed=1), max_new_tokens=30, row_numbers=[i])]
        for i, p in enumerate(prompts)
    ]
    together = list(zip(*decode(model, prompts, Sampling(seed=1), max_new_tokens=30), strict=True))
    assert [list(row) for row in together] == alone
    monkeypatch.setattr("llmtrain.generate.decoding.PREFILL_TOKENS", 80)  # two rows at a time
    assert list(zip(*decode(model, prompts, Sampling(seed=1), max_new_tokens=30), strict=True)) == together


def test_rows_end_apart(model):
    prompts = [text(5), text(9)]
    steps = list(decode(model, prompts, Sampling(temperature=0), max_new_tokens=10))
    ends = {0: steps[3][0], 1: steps[6][1]}
    seen: dict[int, list[int]] = {0: [], 1: []}

    def stop(row: int, token: int) -> bool:
        seen[row].append(token)
        return len(seen[row]) == (4 if row == 0 else 7)

    found = list(decode(model, prompts, Sampling(temperature=0), max_new_tokens=10, stop=stop))
    assert len(found) == 7, "nothing is decoded once all rows have ended"
    assert [step[0] for step in found] == [*(step[0] for step in steps[:4]), None, None, None]
    assert seen[0][-1] == ends[0] and seen[1][-1] == ends[1]


def test_what_does_not_fit_is_refused(model):
    cache = model.empty_cache(1, 8)
    with torch.no_grad(), pytest.raises(ValueError, match=r"the cache holds 8 tokens; 0 \+ 9 do not fit"):
        model.next_logits(torch.tensor([text(9)]), cache)
    if model.hybrid.positions is not None:
        with pytest.raises(ValueError, match=r"learned positions for model\.max_seq_len = 300"):
            model.empty_cache(1, 301)
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        next(decode(model, [text(3), []], max_new_tokens=4))
