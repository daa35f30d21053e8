"""/metrics in Prometheus' text format (exposition format 0.0.4)."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from llmtrain.serve.answering import EngineState

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histograms in seconds."""


class Histogram:
    """Numbers of values by size, as Prometheus counts them."""

    def __init__(self) -> None:
        self.counts, self.total, self.count = [0] * len(BUCKETS), 0.0, 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        for at, bound in enumerate(BUCKETS):
            self.counts[at] += value <= bound


@dataclass
class Counts:
    """Numbers for /metrics. ended: requests by the reason of their end."""

    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "error"), 0))
    refused: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)


def exposition(state: EngineState, rows: int, counts: Counts) -> str:
    """All metrics of a server as text. rows: requests that are answered at a time."""
    lines = [
        *_metric("requests_running", "gauge", "Requests that are being answered.", [("", state.running)]),
        *_metric("requests_waiting", "gauge", "Requests that wait for a row.", [("", state.waiting)]),
        *_metric("rows", "gauge", "Requests that can be answered at a time.", [("", rows)]),
        *_metric("cache_bytes", "gauge", "Memory of keys, values and states.", [("", state.cache_bytes)]),
        *_metric("prompt_tokens_total", "counter", "Prompt tokens read.", [("", state.prompt_tokens)]),
        *_metric("generation_tokens_total", "counter", "Tokens drawn.", [("", state.tokens)]),
        *_metric(
            "prefix_tokens_total",
            "counter",
            "Prompt tokens that were read before.",
            [("", state.prefix_tokens)],
        ),
        *_metric(
            "requests_total",
            "counter",
            "Requests that have ended, by reason.",
            [(f'{{end="{end}"}}', count) for end, count in counts.ended.items()],
        ),
        *_metric("refused_total", "counter", "Bodies refused with a status of 4xx.", [("", counts.refused)]),
        *_histogram("first_token_seconds", "Time from a body to its first token.", counts.first_token),
        *_histogram("request_seconds", "Time from a body to the end of its answer.", counts.whole),
    ]
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, values: Iterable[tuple[str, float]]) -> list[str]:
    name = f"llmtrain_{name}"
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *(f"{name}{label} {value}" for label, value in values)]


def _histogram(name: str, text: str, of: Histogram) -> list[str]:
    values = [(f'_bucket{{le="{bound}"}}', count) for bound, count in zip(BUCKETS, of.counts, strict=True)]
    return _metric(
        name, "histogram", text, [*values, ('_bucket{le="+Inf"}', of.count), ("_sum", of.total), ("_count", of.count)]
    )
