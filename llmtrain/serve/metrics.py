"""/metrics in Prometheus' text format (exposition format 0.0.4)."""

from collections.abc import Iterable

from llmtrain.serve.worker import BUCKETS, Counts, Histogram, Worker


def exposition(worker: Worker, counts: Counts) -> str:
    """All metrics of a server as text."""
    engine, prefixes = worker.engine, worker.engine.prefixes
    lines = [
        *_metric("requests_running", "gauge", "Requests that are being answered.", [("", len(engine.active()))]),
        *_metric("requests_waiting", "gauge", "Requests that wait for a row.", [("", worker.waiting)]),
        *_metric("rows", "gauge", "Requests that can be answered at a time.", [("", engine.rows)]),
        *_metric("cache_bytes", "gauge", "Memory of keys, values and states.", [("", engine.nbytes)]),
        *_metric("prompt_tokens_total", "counter", "Prompt tokens read.", [("", engine.prompt_tokens_read)]),
        *_metric("generation_tokens_total", "counter", "Tokens drawn.", [("", engine.tokens_drawn)]),
        *_metric(
            "prefix_tokens_total",
            "counter",
            "Prompt tokens that were read before.",
            [("", prefixes.reused_tokens if prefixes else 0)],
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
