"""The report of a finished run: loss, bits per byte beside simple baselines, a plot, a sample, and what to run next."""

import itertools
import os
import shlex
from collections.abc import Sequence

import torch
from composer.utils import dist

from llmtrain.data.chat.template import own_template
from llmtrain.data.loader.loaders import validated_tokens
from llmtrain.data.partitions.baselines import XZ_BYTES, read_baselines, xz_bits_per_byte
from llmtrain.data.tokenize.stored_tokenizer import load_run_tokenizer, run_tokenizers
from llmtrain.distributed.processes import LAUNCHER
from llmtrain.errors import UserError
from llmtrain.generate.decoding import decode
from llmtrain.generate.sampling import Sampling
from llmtrain.logs import run_log
from llmtrain.models.hf.family import UnsupportedModelError, family_for_model
from llmtrain.schema.config import Config
from llmtrain.train.callbacks.samples import EXACT_MATCH
from llmtrain.train.extend import longer_run, quoted
from llmtrain.train.report.picture import plot_loss
from llmtrain.train.report.several_runs import draw_runs, read_runs
from llmtrain.train.run import Outcome

SAMPLE_TOKENS = 64
_QUALITY = {
    "cross_entropy": ("validation loss", " nats per token"),
    "preference_loss": ("validation loss", ""),
    "accuracy": ("accuracy", " of held-out pairs have the chosen answer before the rejected one"),
}


def report(config: Config, outcome: Outcome, *, file: str, overrides: Sequence[str], seconds: float) -> None:
    """Log the report. Every rank calls this: sampling from a sharded model takes all of them."""
    completion = _complete(config, outcome)
    if dist.get_global_rank() != 0:
        return
    minutes, rest = divmod(round(seconds), 60)
    run_log.info(
        f"\n{config.name}: {outcome.step} steps, {outcome.tokens:,} tokens; this session took {minutes}:{rest:02d} min"
    )
    _tell_quality(config, outcome)
    picture = None
    try:
        picture = plot_loss(outcome.folder)
    except OSError as error:  # a full disk: the rest of the report needs none
        run_log.warning(f"WARNING: {outcome.folder / 'loss.png'} was not drawn: {error.strerror or error}")
    if picture:
        run_log.info(f"loss curve       {picture}")
    _draw_exact_match(config, outcome)
    if completion:
        run_log.info(f"\nsample, after the prompt {config.eval.prompt!r}:\n{completion}")
    _tell_next(config, outcome, file, overrides)


def _draw_exact_match(config: Config, outcome: Outcome) -> None:
    """Draw RUN/exact-match.png of a run that answers questions."""
    if config.eval.samples is None or not config.eval.samples.questions:
        return
    runs = read_runs([outcome.folder], EXACT_MATCH)
    _, values = runs[0].points(EXACT_MATCH, "steps")
    count, out = config.eval.samples.questions, outcome.folder / "exact-match.png"
    run_log.info(f"exact match      {values[0]:.1%} → {values[-1]:.1%} of {count} held-out questions: {out}")
    try:
        draw_runs(runs, EXACT_MATCH, "steps", out)
    except OSError as error:  # a full disk
        run_log.warning(f"WARNING: {out} was not drawn: {error.strerror or error}")


def _tell_quality(config: Config, outcome: Outcome) -> None:
    for metric, (label, unit) in _QUALITY.items():
        if metric in outcome.validation:
            run_log.info(f"{label:<16} {outcome.validation[metric]:.4f}{unit}")
        for name, value in outcome.validation.items():
            if name.endswith(f"/{metric}"):
                run_log.info(f"  {name.removesuffix(f'/{metric}'):<14} {value:.4f}")
    if "bits_per_byte" not in outcome.validation:
        return
    line = f"bits per byte    {outcome.validation['bits_per_byte']:.3f} on held-out text"
    if config.data.prepare and not config.data.prepare.streams:
        others = _baselines(config, config.data.prepare.out)
        line += "".join(f"; {name} {value:.3f}" for name, value in others.items() if value is not None)
    run_log.info(line)


def _baselines(config: Config, folder: str) -> dict[str, float | None]:
    """Bits per byte of other models of the validated text, by their names; with eval.max_samples xz alone, over those samples."""
    chosen = None if config.eval.max_samples is None else validated_tokens(config.data, config.eval.max_samples)
    if chosen is None:
        of_all = read_baselines(folder)
        return {"xz -9": of_all.xz, "a unigram model over the same tokens": of_all.unigram}
    tokenizer = load_run_tokenizer(config.data.model_dump(mode="json"))
    count = min(config.eval.max_samples or 0, XZ_BYTES // config.data.seq_len)
    text = "".join(tokenizer.decode(tokens.tolist()) for tokens in itertools.islice(chosen, count)).encode()
    same = "the same" if count == config.eval.max_samples else "the first"
    return {f"xz -9 of {same} {count:,} samples": xz_bits_per_byte(text) if text else None}


def _complete(config: Config, outcome: Outcome) -> str | None:
    if config.eval.prompt is None:
        return None
    tokenizer = load_run_tokenizer(config.data.model_dump(mode="json"))
    prompt = tokenizer.prompt_ids(config.eval.prompt)
    new = min(SAMPLE_TOKENS, config.model.max_seq_len - len(prompt))
    if new < 1:
        return None
    # No stop token: every rank must take every step.
    options = Sampling(temperature=0.8, top_k=50, seed=config.seed)
    steps = decode(outcome.model.eval(), [prompt], options, max_new_tokens=new)
    return config.eval.prompt + tokenizer.decode([step[0] for step in steps if step[0] is not None])


def _chats(config: Config) -> bool:
    """True for a model of answers whose tokenizer has a chat template."""
    try:
        return config.objective.trained_only and bool(
            own_template(load_run_tokenizer(config.data.model_dump(mode="json")))
        )
    except UserError:
        return False


def _tell_next(config: Config, outcome: Outcome, file: str, overrides: Sequence[str]) -> None:
    command = "uv run llmtrain" if "UV_RUN_RECURSION_DEPTH" in os.environ else "llmtrain"
    arguments = [file, *overrides]
    train, processes = f"{command} train", dist.get_world_size()
    elsewhere = processes > 1 and LAUNCHER not in os.environ  # as torchrun, which takes no --nproc of ours
    if processes != (torch.cuda.device_count() or 1) and not elsewhere:
        train += f" --nproc {processes}"
    prompt = config.eval.prompt or "Once upon a time"
    run_log.info("\nnext:")
    for line in longer_run(config, outcome.schedule, outcome.steps_per_epoch, train, arguments):
        run_log.info(f"  {line}")
    ranks = f" --world-size {processes}" if processes > 1 else ""
    run_log.info(f"  {command} describe{ranks} {quoted(arguments)}")
    run = shlex.quote(str(config.run_dir))
    tokenizer = "" if run_tokenizers(config.data.model_dump(mode="json")) else " --tokenizer TOKENIZER"
    asks = " --chat" if _chats(config) else f" --prompt {shlex.quote(prompt.strip())}"
    run_log.info(f"  {command} generate {run}{asks}{tokenizer}")
    try:
        architecture = family_for_model(config.model).architecture
    except UnsupportedModelError:
        return
    run_log.info(f"  {command} export {run} exported/{config.name}{tokenizer}   # {architecture} of transformers")
