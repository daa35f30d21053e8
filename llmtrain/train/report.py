"""The report of a finished run: loss, bits per byte beside simple baselines, a plot, a sample, and what to run next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from composer.utils import dist

from llmtrain.data.baselines import read_baselines
from llmtrain.data.tokenizer import load_tokenizer
from llmtrain.generate.decoding import decode
from llmtrain.generate.load import run_tokenizer_path
from llmtrain.generate.sampling import Sampling
from llmtrain.models.hf.family import UnsupportedModelError, family_for_model
from llmtrain.schema.config import Config
from llmtrain.train.loggers import read_metrics
from llmtrain.train.run import Outcome

SAMPLE_TOKENS = 64


def report(config: Config, outcome: Outcome, *, file: str, overrides: Sequence[str], seconds: float) -> None:
    """Print the report. Every rank calls this: sampling from a sharded model takes all of them."""
    completion = _complete(config, outcome)
    if dist.get_global_rank() != 0:
        return
    minutes, rest = divmod(round(seconds), 60)
    print(
        f"\n{config.name}: {outcome.step} steps, {outcome.tokens:,} tokens; this session took {minutes}:{rest:02d} min"
    )
    _print_quality(config, outcome)
    picture = plot_loss(outcome.folder)
    if picture:
        print(f"loss curve       {picture}")
    if completion:
        print(f"\nsample, after the prompt {config.eval.prompt!r}:\n{completion}")
    _print_next(config, file, overrides)


def _print_quality(config: Config, outcome: Outcome) -> None:
    if outcome.validation_loss is None:
        return
    print(f"validation loss  {outcome.validation_loss:.4f} nats per token")
    if outcome.bits_per_byte is None:
        return
    line = f"bits per byte    {outcome.bits_per_byte:.3f} on held-out text"
    if config.data.prepare:
        baselines = read_baselines(config.data.prepare.out)
        others = {"xz -9": baselines.xz, "a unigram model over the same tokens": baselines.unigram}
        line += "".join(f"; {name} {value:.3f}" for name, value in others.items() if value is not None)
    print(line)


def plot_loss(folder: Path) -> Path | None:
    """Draw RUN/loss.png from RUN/metrics.jsonl: training and validation loss over steps. None if nothing was logged."""
    log = folder / "metrics.jsonl"
    if not log.exists():
        return None
    steps, losses = read_metrics(log, "loss/train/total")
    at, validation = read_metrics(log, "metrics/validation/cross_entropy")
    if not steps:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
    axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="training, each step")
    axes.plot(steps, _smooth(losses), color="#2171b5", linewidth=1.8, label="training, smoothed")
    if at:
        axes.plot(at, validation, "o-", color="#d94801", markersize=5, label="validation")
        axes.annotate(
            f"{validation[-1]:.3f}", (at[-1], validation[-1]), textcoords="offset points", xytext=(-6, 8), ha="right"
        )
    axes.set(xlabel="step", ylabel="cross entropy, nats per token", title=folder.name, xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smooth, total, mass = [], 0.0, 0.0
    for value in values:
        total, mass = weight * total + (1 - weight) * value, weight * mass + (1 - weight)
        smooth.append(total / mass)
    return smooth


def _complete(config: Config, outcome: Outcome) -> str | None:
    if config.eval.prompt is None:
        return None
    tokenizer = load_tokenizer(run_tokenizer_path(config.data.model_dump(mode="json")))
    prompt = tokenizer.encode(config.eval.prompt) or [tokenizer.eod_id]
    new = min(SAMPLE_TOKENS, config.model.max_seq_len - len(prompt))
    if new < 1:
        return None
    # No stop token: every rank must take every step.
    options = Sampling(temperature=0.8, top_k=50, seed=config.seed)
    steps = decode(outcome.model.eval(), [prompt], options, max_new_tokens=new)
    return config.eval.prompt + tokenizer.decode([step[0] for step in steps if step[0] is not None])


def _print_next(config: Config, file: str, overrides: Sequence[str]) -> None:
    command = "uv run llmtrain" if "UV_RUN_RECURSION_DEPTH" in os.environ else "llmtrain"
    same = " ".join(shlex.quote(word) for word in [file, *overrides])
    longer = f"{int(config.train.duration.value * 2)} {config.train.duration.unit}"
    prompt = config.eval.prompt or "Once upon a time"
    print("\nnext:")
    print(f"  {command} train {same} train.duration={shlex.quote(longer)}   # resume, and train on")
    print(f"  {command} describe {same}")
    run = shlex.quote(str(config.run_dir))
    print(f"  {command} generate {run} --prompt {shlex.quote(prompt.strip())}")
    try:
        architecture = family_for_model(config.model).architecture
    except UnsupportedModelError:
        return
    print(f"  {command} export {run} exported/{config.name}   # {architecture} of transformers", flush=True)
