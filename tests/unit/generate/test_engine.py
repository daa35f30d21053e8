"""Admission, cancellation, ends and memory of the engine; the tokens themselves: tests/numerics/test_engine.py."""

from typing import Any

import pytest
import torch

from llmtrain.errors import UserError
from llmtrain.generate.decoding import prefill
from llmtrain.generate.engine import Engine, Request, Token
from llmtrain.generate.prefixes import PrefixCache
from llmtrain.generate.sampling import Sampling
from llmtrain.generate.slots import filled
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from tests.support.models import build

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return build("zamba2 as the 1.2B", platform.cpu(), layers="m s+m")


def engine(model: CausalLM, **options: Any) -> Engine:
    settings: dict[str, Any] = {"rows": 2, "max_len": 40, "piece": 8}
    return Engine(model, **settings | options)


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 3, "a prompt has no tokens"),
        ([1], 0, "0 new tokens asked for"),
        ([1, 97], 3, "token 97 is outside the model's vocabulary of 97"),
        ([-1], 3, "token -1 is outside"),
        ([1] * 30, 11, r"30 tokens and 11 new ones are 41; there is room for 40 together"),
    ],
)
def test_rejects_what_it_cannot_answer(model, prompt, new, message):
    made = engine(model)
    with pytest.raises(UserError, match=message):
        made.submit(Request(prompt, new))
    assert not made.busy


def test_learned_positions_bound_the_length():
    model = build("mpt with learned positions and clipping", platform.cpu(), layers="a")
    with pytest.raises(UserError, match=r"learned positions for model\.max_seq_len = 300"):
        Engine(model, max_len=301)
    (done,) = Engine(model, max_len=300, rows=2).run([Request([1, 2, 3], 297, GREEDY)])
    assert len(done.ids) == 297


@pytest.mark.parametrize("deterministic", [False, True])
def test_requests_end_by_stop_length_token_and_cancellation(model, deterministic):
    (free,) = engine(model).run([Request([1, 2, 3], 9, GREEDY)])
    made = engine(model, deterministic=deterministic)
    third = free.ids[2]
    first = free.ids.index(third)
    stopped = Request([1, 2, 3], 9, GREEDY, take=lambda token: token.id == third)
    ended = Request([1, 2, 3], 9, GREEDY, ends=frozenset({third}))
    waits, leaves = Request([5], 30, GREEDY), Request([6], 30, GREEDY)

    def raises(token: Token) -> bool:
        raise RuntimeError("the reader broke")

    broken = Request([7], 5, GREEDY, take=raises)
    for one in (stopped, ended, leaves, waits, broken):
        made.submit(one)
    leaves.cancelled = True
    while not waits.tokens:
        made.step()
    waits.cancelled = True
    while made.busy:
        made.step()
    assert [one.end for one in (stopped, ended, leaves, waits, broken)] == [
        *("stop", "eod", "cancelled", "cancelled", "cancelled")
    ]
    assert stopped.ids == ended.ids == free.ids[: first + 1] and leaves.ids == []
    assert str(broken.error) == "the reader broke" and broken.ids
    # All rows are free again.
    again = made.run([Request([1, 2, 3], 9, GREEDY), Request([1, 2, 3], 9, GREEDY), Request([9], 1, GREEDY)])
    assert again[0].ids == again[1].ids == free.ids and [one.end for one in again] == ["length"] * 3


def test_a_prompt_that_requests_have_in_common_is_read_once(model):
    def group(made: Engine) -> list[Request]:
        prompts = [[1, 2, 3]] * 3 + [[4, 5]] * 2 + [[1, 2, 3]]
        return made.run(Request(ids, 6, Sampling(seed=3), number=at) for at, ids in enumerate(prompts))

    made = engine(model)
    found = [one.ids for one in group(made)]
    assert made.prompt_tokens_read == 3 + 2 + 3 and len({tuple(ids) for ids in found[:3]}) == 3
    assert found == [one.ids for one in group(engine(model, deterministic=True))]
    made.weights_changed()
    group(made)
    assert made.prompt_tokens_read == 2 * 8, "nothing of other weights is left"


def test_prompts_read_together_are_bounded_in_number_and_beside_decoding_in_tokens(model, monkeypatch):
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "llmtrain.generate.engine.prefill",
        lambda model, cache, prompts: (
            shapes.append((len(prompts), max(map(len, prompts)))),
            prefill(model, cache, prompts),
        )[1],
    )
    made = engine(model, rows=40, prompt_tokens=12)
    for at in range(20):
        made.submit(Request([at + 1, 1], 9, GREEDY))
    made.step()
    assert shapes == [(16, 2), (4, 2)] and len(made.live) == 20
    for at in range(6):
        made.submit(Request([at + 1, 2, 3, 4], 9, GREEDY))
    shapes.clear()
    made.step()
    assert shapes == [(3, 4)], "twelve tokens"
    made.step()
    assert shapes == [(3, 4)] * 2 and len(made.live) == 26


def test_a_cancelled_prompt_is_read_no_further(model):
    made, request = engine(model, prompt_tokens=8), Request([3] * 33, 5, GREEDY)
    other = made.submit(Request([1], 20, GREEDY))
    made.step()
    made.submit(request)
    made.step()
    assert made.prompt_tokens_read == 1 + 8
    request.cancelled = True
    made.step()
    assert request.end == "cancelled" and made.prompt_tokens_read == 1 + 8
    other.cancelled = True
    made.step()
    assert other.end == "cancelled" and not made.busy


def test_a_long_prompt_is_read_beside_decoding(model):
    made = engine(model)
    short = made.submit(Request([1], 30, GREEDY))
    made.step()
    long = made.submit(Request([2] * 33, 5, GREEDY))
    counts = []
    while not long.tokens:
        made.step()
        counts.append(len(short.tokens))
    assert len(counts) == 5 and counts == list(range(counts[0], counts[0] + 5))  # 5 pieces, a token beside each


def test_memory_is_fixed_and_prefixes_keep_to_theirs(model):
    made = engine(model, prefix_bytes=20_000)
    before = made.slots.nbytes
    for seed in range(20):
        ids = torch.randint(97, (30,), generator=torch.Generator().manual_seed(seed)).tolist()
        made.run([Request(ids, 4, GREEDY)])
    assert made.slots.nbytes == before and made.prefixes is not None
    assert 0 < made.prefixes.nbytes <= 20_000
    assert made.prefixes.nbytes == sum(t.nbytes for piece in made.prefixes._pieces.values() for t in piece)
    assert made.nbytes == before + made.prefixes.nbytes


def test_keys_in_pages_admit_by_what_fits_and_in_order(model):
    """At equal memory, short requests beside a limit of 160 tokens; a long one is not overtaken."""
    rows, per_token = 4, model.empty_cache(1, 2).nbytes - model.empty_cache(1, 1).nbytes
    equal = rows * 160 * per_token
    made = engine(model, rows=64, max_len=160, key_bytes=equal)
    assert made.slots.nbytes <= equal + 160 * per_token + 65 * (model.empty_cache(1, 1).nbytes - per_token)
    short = [made.submit(Request([at + 1, 2], 20, GREEDY)) for at in range(30)]
    made.step()
    assert 2 * rows < len(made.live) < 30
    long, last = made.submit(Request([3] * 100, 60, GREEDY)), made.submit(Request([4], 1, GREEDY))
    while made.busy:
        made.step()
        assert last.end is None or long.tokens
    assert all(len(one.ids) == 20 for one in short) and len(long.ids) == 60
    with pytest.raises(UserError, match="hold keys of 160 tokens in pages of 32; a request of 160 needs"):
        engine(model, max_len=160, key_bytes=160 * per_token)


def test_prefixes_end_before_the_last_token_and_forget_the_longest_unused(model):
    cache = model.empty_cache(1, 40)
    kept = PrefixCache(1 << 20, 8)
    ids = list(range(24))
    for end in (8, 16, 24):
        with torch.no_grad():
            model.fill(torch.tensor([ids[end - 8 : end]]), cache)
        kept.keep(ids[:end], cache)
    for prompt, expected in ((ids, 16), ([*ids, 1], 24), (ids[:8], 0), (ids[:9], 8), ([0, *ids], 0)):
        cache.clear()
        assert kept.restore(prompt, cache) == expected == cache.length == int(cache.next)
    kept.limit = kept.nbytes - 1
    cache.clear()
    with torch.no_grad():
        model.fill(torch.tensor([[50] * 8]), cache)
    kept.keep([50] * 8, cache)
    cache.clear()
    assert kept.restore([*ids, 1], cache) == 8, "the ends of a chain are forgotten first"


@pytest.mark.parametrize(
    ("leaving", "moves"),
    [([], []), ([4], []), ([0], [(0, 4)]), ([3, 1], [(1, 4)]), ([0, 1], [(0, 3), (1, 4)]), ([4, 2, 0, 1, 3], [])],
)
def test_the_last_of_five_rows_take_the_places_of_those_that_leave(leaving, moves):
    assert filled(5, leaving) == moves
