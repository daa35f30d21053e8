"""Requests that come and go get what each gets alone, for every kind of layer; what was read before is not read again."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from llmtrain.errors import UserError
from llmtrain.generate import pages, prompt_passes, slots
from llmtrain.generate.decoding import decode
from llmtrain.generate.engine import Engine, Request
from llmtrain.generate.sampling import Sampling
from llmtrain.kernels import platform
from llmtrain.models.cache import PAGE_SLOTS
from llmtrain.models.causal_lm import CausalLM
from tests.support import gated_conv
from tests.support.models import ATTENTION, MAMBA, MODELS, VOCAB, build

NEMOTRON = {
    "blocks": {
        "m": MAMBA | {"n_groups": 2, "mlp": {"type": "relu2", "d_ff": 48}},
        "a": ATTENTION | {"n_kv_heads": 2, "position": {"type": "none"}, "mlp": {"type": "relu2", "d_ff": 48}},
    },
    "layers": "m m a m",
}
MAX_LEN = 64
NAMED = (
    "llama with grouped queries",
    "a window and soft caps",
    "mamba2 with groups",
    "zamba2 as the 1.2B",
    "gated deltanet with grouped keys, and gated attention",
)


@pytest.fixture(
    params=[
        *NAMED,
        "nemotron-h",
        *(pytest.param(name, marks=pytest.mark.ci) for name in (*sorted({*MODELS} - {*NAMED}), "without a cache")),
    ],
    scope="module",
)
def model(request) -> Iterator[CausalLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "nemotron-h", NEMOTRON)
        yield gated_conv.build("g a g") if request.param == "without a cache" else build(request.param, platform.cpu())


def made(count: int, seed: int = 0, **changes: Any) -> list[Request]:
    """Requests of any length, some of which share a beginning, and of any settings."""
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB) for _ in range(40)]
    found = []
    for number in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 16, 17, rng.randint(2, 40)]))]
        if number % 3 == 0:
            prompt = common[: rng.randint(20, 40)] + prompt[:10]
        sampling = rng.choice(
            [
                Sampling(temperature=0),
                Sampling(seed=number),
                Sampling(temperature=0.7, top_p=0.9, seed=3),
                Sampling(top_k=5, seed=1, repetition_penalty=1.2),
            ]
        )
        options: dict[str, Any] = {
            "sampling": sampling,
            "number": number,
            "ends": frozenset({7} if number % 3 == 1 else ()),
        } | changes
        found.append(Request(prompt, rng.randint(1, MAX_LEN - len(prompt) - 1), **options))
    return found


def answered(model: CausalLM, requests: list[Request], seed: int = 0, **options: Any) -> list[list[int]]:
    """The tokens of requests that come at random steps, after the checks that nothing is left behind."""
    engine = Engine(model, max_len=MAX_LEN, piece=16, **options)
    rng, rest = random.Random(seed), list(requests)
    while rest or engine.busy:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if rest:
                engine.submit(rest.pop(0))
        engine.step()
    assert all(request.end in ("eod", "length") for request in requests)
    assert not engine.live and engine.prompt_tokens_read <= sum(len(one.prompt) for one in requests)
    return [request.ids for request in requests]


def alone(model: CausalLM, request: Request) -> list[int]:
    steps = decode(
        model,
        [request.prompt],
        request.sampling,
        max_new_tokens=request.max_new_tokens,
        stop=lambda row, token: token in request.ends,
        row_numbers=[request.number],
    )
    return [step[0] for step in steps if step[0] is not None]


def test_requests_that_come_and_go_get_what_each_gets_alone(model, monkeypatch):
    monkeypatch.setattr(slots, "SPARE_SLOTS", 4)  # rows are moved often
    moves: list[int] = []
    move = slots.SharedSlots._move
    monkeypatch.setattr(slots.SharedSlots, "_move", lambda self, by: (moves.append(by), move(self, by)))
    expected = [alone(model, request) for request in made(8, seed=4, ends=frozenset())]
    for ahead in (False, True):
        requests = made(8, seed=4, ends=frozenset())
        assert answered(model, requests, rows=3, prompt_tokens=20, ahead=ahead) == expected
    assert min(moves) < 0 < max(moves)


def test_keys_in_pages_give_what_each_gets_alone(model, monkeypatch):
    """In the memory of two requests of the greatest length, with rows for eight."""
    per_token = model.empty_cache(1, 2).nbytes - model.empty_cache(1, 1).nbytes
    bound = (2 * pages.most_pages(MAX_LEN) + 1) * PAGE_SLOTS * per_token
    if not per_token:
        with pytest.raises(UserError, match="keeps no keys"):
            Engine(model, key_bytes=1 << 20)
        return
    moves: list[int] = []
    move = pages.PagedSlots._move
    monkeypatch.setattr(pages.PagedSlots, "_move", lambda self, by: (moves.append(by), move(self, by)))
    made_of = lambda: made(12, seed=4, ends=frozenset())  # noqa: E731
    expected = [alone(model, request) for request in made_of()]
    for ahead in (False, True):
        engine = Engine(model, max_len=MAX_LEN, piece=16, rows=8, prompt_tokens=20, ahead=ahead, key_bytes=bound)
        slots = engine.slots
        assert isinstance(slots, pages.PagedSlots)
        whole, most = sorted(slots.free), 0
        requests = made_of()
        first = min(requests, key=lambda one: len(one.prompt) - one.max_new_tokens)  # the others begin further on
        engine.submit(first)
        rest = [one for one in requests if one is not first]
        while rest or engine.busy:
            engine.step()
            for _ in range(min(len(rest), 2)):
                engine.submit(rest.pop(0))
            most = max(most, len(engine.live))
            taken = [page for row in slots.pages for page in row]
            assert len(engine.live) == len(slots.pages) and sorted(slots.free + taken) == whole
        assert [request.ids for request in requests] == expected
        assert 2 < most < 8, "more than rows of the greatest length, and no more than fit"
        assert slots.cache.table is not None and not slots.cache.table.any()
    assert min(moves) < 0 < max(moves)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prepared_engine_makes_no_further_steps_and_answers_the_same(model, deterministic, monkeypatch):
    """Those of a GPU: for each power of two rows, the second call captures a graph; prompts are padded to one of three lengths."""
    monkeypatch.setattr(prompt_passes, "LENGTHS", (4, 20, 99))
    expected = [alone(model, request) for request in made(8, seed=4, ends=frozenset())]
    engine = Engine(model, max_len=MAX_LEN, piece=48, rows=6, deterministic=deterministic, prefix_bytes=50_000)
    steps: dict[int, Any] = {}
    if isinstance(engine.slots, slots.SharedSlots):
        engine.slots.padded, steps = True, engine.slots.steps
    engine.prepare()
    assert sorted(steps) == ([] if deterministic else [1, 2, 4, 6]) and all(one.calls == 2 for one in steps.values())
    assert engine.prefixes is not None and (engine.prefixes.nbytes, engine.prompt_tokens_read, engine.tokens_drawn) == (
        0,
        0,
        0,
    )
    monkeypatch.setattr(slots, "DecodeStep", None)
    read: list[tuple[int, int]] = []
    call = prompt_passes.PromptPass.__call__
    monkeypatch.setattr(
        prompt_passes.PromptPass,
        "__call__",
        lambda self, prompts: (read.append((len(prompts), self.length)), call(self, prompts))[1],
    )
    requests = made(8, seed=4, ends=frozenset())
    for request in requests:
        engine.submit(request)
        engine.step()
    while engine.busy:
        engine.step()
    assert deterministic or {length for _, length in read} == {4, 20, 48}, read
    assert [request.ids for request in requests] == expected
    assert deterministic or sum(one.calls for one in steps.values()) > 8
    assert engine.tokens_drawn == sum(map(len, expected))


def test_short_prompts_that_are_read_together_get_what_each_gets_alone(model, monkeypatch):
    """Nine prompts of one to nine tokens, of which each of three has a second request, and one that is longer than a piece."""
    prompts = [[(7 * at + i) % VOCAB for i in range(at)] for at in (4, 9, 1, 7, 2, 8, 3, 6, 5)]
    lengths: list[int] = []
    read = CausalLM.next_logits

    def counted(self: CausalLM, ids: torch.Tensor, *args: Any) -> torch.Tensor:
        lengths.append(ids.numel())
        return read(self, ids, *args)

    def asked() -> list[Request]:
        some = [*prompts[:4], [5] * 20, *prompts[4:], *prompts[-3:]]
        return [Request(ids, 5, Sampling(seed=at), number=at) for at, ids in enumerate(some)]

    expected = [alone(model, request) for request in asked()]
    monkeypatch.setattr(CausalLM, "next_logits", counted)
    engine = Engine(model, max_len=MAX_LEN, piece=16, rows=13, prompt_tokens=200)
    assert [request.ids for request in engine.run(asked())] == expected
    # Four prompts padded to nine tokens, the long one in two pieces, five padded to eight; then tokens of thirteen rows.
    assert lengths == [4 * 9, 16, 4, 5 * 8, *[13] * 4]
    assert engine.prompt_tokens_read == sum(map(len, prompts)) + 20


@pytest.mark.ci
@pytest.mark.parametrize(("count", "rows"), [(21, 3), pytest.param(200, 7, marks=pytest.mark.slow)])
def test_many_requests_that_come_and_go_get_what_each_gets_alone(model, count, rows):
    """Of the first 21, seven follow each other in every row; kept prefixes are of more bytes than may be kept."""
    expected = [alone(model, request) for request in made(count, seed=9)]
    assert answered(model, made(count, seed=9), rows=rows + 1) == expected
    assert answered(model, made(count, seed=9), rows=rows, prefix_bytes=20_000, prompt_tokens=40) == expected


def test_log_likelihoods_are_those_of_teacher_forcing(model):
    requests = made(4, seed=3, top=3)
    answered(model, requests)
    for request in requests:
        ids = torch.tensor([[*request.prompt, *request.ids]])
        with torch.no_grad():
            expected = model.logits(ids)[0, len(request.prompt) - 1 : -1].float().log_softmax(-1)
        found = torch.tensor([token.log_likelihood for token in request.tokens])
        chosen = expected.gather(1, torch.tensor(request.ids)[:, None])[:, 0]
        torch.testing.assert_close(found, chosen, atol=1e-5, rtol=1e-5)
        best = torch.tensor([[value for _, value in token.top] for token in request.tokens])
        torch.testing.assert_close(best, expected.topk(3).values, atol=1e-5, rtol=1e-5)


def test_a_shared_beginning_is_read_once_and_changes_no_bit(model):
    def of(**options: Any) -> tuple[Engine, list[list[float]]]:
        engine = Engine(model, max_len=MAX_LEN, piece=16, rows=3, deterministic=True, **options)
        requests = engine.run(made(7, seed=1))
        return engine, [[token.log_likelihood for token in request.tokens] for request in requests]

    (plain, expected), (reused, found) = of(), of(prefix_bytes=1 << 22)
    assert found == expected and reused.prefixes is not None
    assert reused.prefixes.reused_tokens >= 2 * 16
    assert reused.prompt_tokens_read + reused.prefixes.reused_tokens == plain.prompt_tokens_read


def test_a_deterministic_engine_gives_the_same_bits_whatever_the_neighbours(model):
    def bits(requests: list[Request]) -> list[list[float]]:
        return [[token.log_likelihood for token in request.tokens] for request in requests]

    together = made(4, seed=2)
    answered(model, together, deterministic=True)
    for request, one in zip(made(4, seed=2), together, strict=True):
        answered(model, [request], deterministic=True, rows=1)
        assert bits([request]) == bits([one])
