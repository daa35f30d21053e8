"""data.mixture: what it may say, and what a run is told about it."""

from typing import Any

import numpy as np
import pytest

from llmtrain.config.decode import decode
from llmtrain.data.loader.mixture import (
    mixture_phases,
    mixture_problems,
    mixture_report,
    seekable_order,
    unchanged_steps,
)
from llmtrain.data.loader.mixture_blocks import Phase
from llmtrain.data.loader.order import SampleOrder
from llmtrain.schema.data import DataConfig

STREAMS: dict[str, Any] = {"web": {"local": "web"}, "code": {"local": "code"}}


def written(
    mixture: list[dict[str, Any]] | None = None, streams: dict[str, Any] = STREAMS, **options
) -> dict[str, Any]:
    return {"seq_len": 10, "train": {"streams": streams}, "mixture": mixture} | options


def config(*args, **options) -> DataConfig:
    return DataConfig.model_validate(written(*args, **options))


def said(*args, **options) -> dict[str, str]:
    return {problem.path: problem.message for problem in decode(DataConfig, written(*args, **options))[1]}


GOOD = [
    {"until": "50 steps", "proportions": {"web": 3, "code": 1}},
    {"until": "8000 tokens", "proportions": {"web": 1, "code": 1}},
    {"proportions": {"web": 0, "code": 1}},
]


def test_phases_begin_at_steps():
    assert said(GOOD) == {} and list(mixture_problems(config(GOOD), 8, None, 200)) == []
    assert mixture_phases(config(GOOD), 8, [1, 1]) == (Phase(0, (3, 1)), Phase(50, (1, 1)), Phase(100, (0, 1)))


def test_proportions_of_streams_are_one_phase():
    given = {
        name: stream | {"proportion": share} for (name, stream), share in zip(STREAMS.items(), (0.9, 0.1), strict=True)
    }
    assert mixture_phases(config(streams=given), 8, [1, 1]) == (Phase(0, (0.9, 0.1)),)
    assert mixture_phases(config(), 8, [1, 1]) == ()


def test_phases_that_go_back_are_reported():
    [problem] = mixture_problems(config(GOOD), 20, None, None)  # 8,000 tokens are 40 steps
    assert problem.path == "data.mixture.1.until" and "at step 40, but the phase begins at step 50" in problem.message


BUDGETS = [
    {"tokens": {"web": 6e3, "code": 2000}},
    {"repeats": {"web": 0.5, "code": 2}},
    {"until": "200 steps", "proportions": {"web": 1, "code": 3}},
    {"tokens": {"web": 0, "code": 400}},
]


def test_a_phase_of_tokens_or_repeats_ends_when_they_are_read():
    samples = [1000, 100]
    assert said(BUDGETS) == {} and list(mixture_problems(config(BUDGETS), 8, samples, 205)) == []
    phases = mixture_phases(config(BUDGETS), 8, samples)
    # 800 samples, 700, to step 200, 40: and what would follow.
    assert [phase.first_step for phase in phases] == [0, 100, 188, 200, 205]
    assert phases[1].proportions == (500, 200)
    order = seekable_order(config(BUDGETS), 8, [np.full(10, 100), np.full(5, 20)])
    read = np.array([order.counts(phase.first_step) for phase in phases])
    assert np.diff(read, axis=0).tolist() == [[600, 200], [502, 202], [24, 72], [0, 40]]  # 88 steps are 704


def test_a_run_beyond_the_last_budget_is_reported():
    [problem] = mixture_problems(config(BUDGETS), 8, [1000, 100], 206)
    assert (
        problem.path == "train.duration"
        and "206 steps, but the phases of data.mixture end at step 205" in problem.message
    )
    assert list(mixture_problems(config(BUDGETS), 8, None, 206)) == []  # of repeats, with the shards not here yet


@pytest.mark.parametrize("own", [{"code": {"repeats": 3}}, {"code": {"tokens": 3000}}, {"web": {"repeats": 0.25}}])
def test_an_epoch_reads_streams_by_their_budgets(own):
    streams = {name: stream | own.get(name, {}) for name, stream in STREAMS.items()}
    data, sizes = config(streams=streams, num_canonical_nodes=4), [np.full(10, 100), np.full(5, 20)]
    wanted = [250, 100] if "web" in own else [1000, 300]
    order = seekable_order(data, 10, sizes)
    epoch = sum(wanted) // 20 * 20  # whole batches for four nodes
    counts = order.counts(epoch // 10)
    assert sum(counts) == epoch and np.abs(np.array(counts) - wanted).max() <= sum(wanted) - epoch + 1
    ids = order.ids(np.arange(3 * epoch))
    code = np.bincount(ids[ids >= 1000] - 1000, minlength=100)
    assert code.max() - code.min() <= 1


@pytest.mark.parametrize(
    ("mixture", "options", "path", "message"),
    [
        ([], {}, "mixture", "is empty"),
        ([{"until": "5 steps"}], {}, "mixture.0.proportions", "give one of proportions, tokens and repeats"),
        ([GOOD[2] | BUDGETS[0]], {}, "mixture.0.proportions", "give one of"),
        ([{"tokens": {"web": 5}}], {}, "mixture.0.tokens.code", "0 leaves a stream out"),
        ([{"tokens": {"web": 0, "code": 0}}], {}, "mixture.0.tokens", "all are 0"),
        ([{"repeats": {"web": 1, "code": 1}, "until": "5 steps"}], {}, "mixture.0.until", "ends when they are read"),
        ([{"tokens": {"web": 2.5, "code": 1}}], {}, "mixture.0.tokens.web", "integer"),
        ([{"proportions": {"web": 1}}], {}, "mixture.0.proportions.code", "0 leaves a stream out"),
        ([{"proportions": {"web": 1, "code": 1, "x": 1}}], {}, "mixture.0.proportions.x", "no stream"),
        ([*GOOD, GOOD[-1]], {}, "mixture.2.until", "only the last phase has none"),
        (GOOD[:1], {}, "mixture.0.until", "the last phase has none"),
        (GOOD, {"order": "streaming"}, "order", "has no data.mixture"),
        (None, {"stratified": True}, "stratified", "on a mixture alone"),
        (None, {"cache_limit": 10**9}, "cache_limit", "stream web has no remote"),
    ],
)
def test_what_does_not_fit_is_reported(mixture, options, path, message):
    assert message in said(mixture, **options)[path]


@pytest.mark.parametrize("own", ["proportion", "tokens", "repeats"])
def test_a_streams_own_share_beside_a_mixture_is_reported(own):
    streams = {name: stream | {own: 1} for name, stream in STREAMS.items()}
    assert "no effect beside data.mixture" in said(GOOD, streams)[f"train.streams.web.{own}"]


def test_two_shares_of_a_stream_are_reported():
    streams = STREAMS | {"code": {"local": "code", "tokens": 5, "repeats": 2}}
    assert said(None, streams) == {"train.streams.code.tokens": "is given beside repeats; give one of them"}


def test_budgets_need_the_seekable_order_and_training():
    budget = {"streams": STREAMS | {"code": {"local": "code", "repeats": 2}}}
    assert "no data.tokens and repeats" in said(None, budget["streams"], order="streaming")["order"]
    assert "is of training" in said(None, validation=budget)["validation.streams.code.repeats"]


def test_what_a_run_reads_of_each_stream_is_reported():
    data = config(GOOD)
    order = SampleOrder(
        [np.array([1000]), np.array([100])],
        mixture_phases(data, 8, [1000, 100]),
        global_batch=8,
        canonical_nodes=1,
        seed=1,
    )
    web, code = mixture_report(data, order, [1000, 100], 100)
    assert web == "data: web: 62.5 % of the samples, 5,000 tokens, 0.50 passes"
    assert code == "WARNING: data: code: 37.5 % of the samples, 3,000 tokens, 3.00 passes: it is read more than once"


SECOND = {"proportions": {"web": 1, "code": 1}}
LATER: dict[str, tuple[int | None, list[dict[str, Any]]]] = {
    "a further phase, 4 blocks of 64 steps into the last": (356, [*GOOD[:2], GOOD[2] | {"until": "400 steps"}, SECOND]),
    "other shares in the last phase": (100, [*GOOD[:2], {"proportions": {"web": 1, "code": 3}}]),
    "a later end, where the first one cuts a block": (50, [GOOD[0], SECOND | {"until": "300 steps"}, GOOD[2]]),
    "an earlier end": (50, [GOOD[0], SECOND | {"until": "90 steps"}, GOOD[2]]),
    "a budget behind the first phase": (50, [GOOD[0], {"tokens": {"web": 900, "code": 9000}}, GOOD[2]]),
    "another first phase": (0, [GOOD[0] | {"proportions": {"web": 1, "code": 2}}, *GOOD[1:]]),
    "a smaller share, which makes blocks longer": (0, [*GOOD[:2], {"proportions": {"web": 1, "code": 1000}}]),
    "another scale": (None, [GOOD[0] | {"proportions": {"web": 6, "code": 2}}, *GOOD[1:]]),
}
"""Phases in place of GOOD, and the steps that read the same."""


@pytest.mark.parametrize("case", LATER)
@pytest.mark.parametrize("stratified", [False, True])
def test_a_changed_mixture_reads_the_same_in_as_many_steps_as_stated(case, stratified):
    expected, phases = LATER[case]
    before, now = (config(one, stratified=stratified) for one in (GOOD, phases))
    sizes = [np.full(40, 50), np.full(30, 50)]
    first, second = (seekable_order(one, 8, sizes).ids(np.arange(8 * 500)).reshape(500, 8) for one in (before, now))
    assert unchanged_steps(before.model_dump(mode="json")["mixture"], now, 8, [2000, 1500]) == expected
    assert np.array_equal(first[:expected], second[:expected])
    assert np.array_equal(first, second) == (expected is None)
