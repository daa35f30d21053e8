"""Figures of a load by the conventions of `vllm bench serve`: TTFT, TPOT, ITL and end to end, at percentiles; goodput."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.bench.serve.load import Timing
from llmtrain.pictures import new_figure, save_figure

PERCENTILES = (50, 90, 99)
MEASURES = ("ttft", "tpot", "itl", "e2el")


def values(timing: Timing) -> dict[str, list[float]]:
    """Milliseconds of each measure of an answer."""
    per_token = timing.per_token
    found = {
        "ttft": [timing.first],
        "tpot": [] if per_token is None else [per_token],
        "itl": timing.gaps,
        "e2el": [timing.whole],
    }
    return {name: [1000 * one for one in seconds] for name, seconds in found.items()}


def figures(timings: Sequence[Timing], seconds: float, goals: Mapping[str, float]) -> dict[str, Any]:
    """Figures of a load. goals: greatest milliseconds of measures; goodput counts the requests per second that meet all."""
    done = [timing for timing in timings if timing.error is None]
    made: dict[str, Any] = {
        "completed": len(done),
        "failed": len(timings) - len(done),
        "errors": sorted({timing.error for timing in timings if timing.error})[:3],
        "seconds": seconds,
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": sum(one.tokens for one in done) / seconds,
        "total_tokens_per_second": sum(one.tokens + one.prompt_tokens for one in done) / seconds,
    }
    by_answer = [values(timing) for timing in done]
    for name in MEASURES:
        found = [value for one in by_answer for value in one[name]]
        if found:
            made[f"{name}_ms"] = {"mean": float(np.mean(found))} | {
                f"p{q}": float(np.percentile(found, q)) for q in PERCENTILES
            }
    if goals:
        good = [one for one in by_answer if all(max(one[name], default=0.0) <= most for name, most in goals.items())]
        made["goodput"] = len(good) / seconds
    return made


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of results as a Markdown table: latencies in ms at p50 / p90 / p99."""
    goodput = any("goodput" in row for row in rows)
    head = ["lengths", "requests/s sent", "users", "requests/s", "output tokens/s", *MEASURES, "failed"]
    head += ["goodput"] if goodput else []
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        latencies = (row.get(f"{name}_ms") for name in MEASURES)
        cells = [
            f"{row['prompt']}/{row['answer']}",
            str(row["rate"]),
            str(row["users"] or "any"),
            f"{row['requests_per_second']:.2f}",
            f"{row['output_tokens_per_second']:.0f}",
            *(" / ".join(f"{one[f'p{q}']:.0f}" for q in PERCENTILES) if one else "–" for one in latencies),
            str(row["failed"]),
            *([f"{row['goodput']:.2f}"] if goodput else []),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Latency over throughput as load grows, a line for each pair of lengths, of p50 and p99."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    for lengths in dict.fromkeys((row["prompt"], row["answer"]) for row in rows):
        own = [row for row in rows if (row["prompt"], row["answer"]) == lengths and "e2el_ms" in row]
        for percentile, style in (("p50", "-o"), ("p99", "--o")):
            x = [row["output_tokens_per_second"] for row in own]
            y = [row["e2el_ms"][percentile] / 1000 for row in own]
            axes.plot(x, y, style, label=f"{lengths[0]}/{lengths[1]} tokens, {percentile}", markersize=4)
            for row, *at in zip(own, x, y, strict=True):
                label = f"{row['users']} users" if row["users"] else f"{row['rate']}/s"
                axes.annotate(label, (at[0], at[1]), fontsize=7, xytext=(3, 3), textcoords="offset points")
    axes.set_xlabel("output tokens per second")
    axes.set_ylabel("seconds per request, end to end")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    save_figure(figure, file, dpi=150)
