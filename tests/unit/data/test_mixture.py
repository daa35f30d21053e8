"""data.mixture: what it may say, and what a run is told about it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmtrain.config.decode import decode
from llmtrain.data.mixture import mixture_phases, mixture_problems, mixture_report
from llmtrain.data.order import Phase, SampleOrder
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
    assert said(GOOD) == {} and list(mixture_problems(config(GOOD), 8)) == []
    assert mixture_phases(config(GOOD), 8) == (Phase(0, (3, 1)), Phase(50, (1, 1)), Phase(100, (0, 1)))


def test_proportions_of_streams_are_one_phase():
    given = {
        name: stream | {"proportion": share} for (name, stream), share in zip(STREAMS.items(), (0.9, 0.1), strict=True)
    }
    assert mixture_phases(config(streams=given), 8) == (Phase(0, (0.9, 0.1)),)
    assert mixture_phases(config(), 8) == ()


def test_phases_that_go_back_are_told():
    [problem] = mixture_problems(config(GOOD), 20)  # 8,000 tokens are 40 steps
    assert problem.path == "data.mixture.1.until" and "is step 40, but the phase begins at step 50" in problem.message


@pytest.mark.parametrize(
    ("mixture", "options", "path", "message"),
    [
        ([], {}, "mixture", "is empty"),
        ([{"proportions": {"web": 1}}], {}, "mixture.0.proportions.code", "0 leaves a stream out"),
        ([{"proportions": {"web": 1, "code": 1, "x": 1}}], {}, "mixture.0.proportions.x", "no stream"),
        ([*GOOD, GOOD[-1]], {}, "mixture.2.until", "only the last phase has none"),
        (GOOD[:1], {}, "mixture.0.until", "the last phase has none"),
        (GOOD, {"order": "streaming"}, "order", "has no data.mixture"),
        (None, {"stratified": True}, "stratified", "on a mixture alone"),
        (None, {"cache_limit": 10**9}, "cache_limit", "stream web has no remote"),
    ],
)
def test_what_does_not_fit_is_told(mixture, options, path, message):
    assert message in said(mixture, **options)[path]


def test_a_streams_own_proportion_beside_a_mixture_is_told():
    streams = {name: stream | {"proportion": 1} for name, stream in STREAMS.items()}
    assert "no effect beside data.mixture" in said(GOOD, streams)["train.streams.web.proportion"]


def test_what_a_run_reads_of_each_stream_is_reported():
    data = config(GOOD)
    order = SampleOrder(
        [np.array([1000]), np.array([100])], mixture_phases(data, 8), global_batch=8, canonical_nodes=1, seed=1
    )
    web, code = mixture_report(data, order, [1000, 100], 100)
    assert web == "data: web: 62.5 % of the samples, 5,000 tokens, 0.50 passes"
    assert code == "WARNING: data: code: 37.5 % of the samples, 3,000 tokens, 3.00 passes: it is read more than once"
