"""The learning rate where a run goes on to another length, and how to train longer without a jump of it. No torch here."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.checkpoint.base import Checkpoint
from llmtrain.checkpoint.format.manifest import Manifest
from llmtrain.checkpoint.repository import Repository
from llmtrain.config.base import Duration
from llmtrain.schema.config import Config
from llmtrain.schema.schedule import Schedule, resolve


@dataclass(frozen=True)
class RateChange:
    """The rate of the last step taken, that of the next one, and whether it is another than was planned."""

    before: float
    after: float
    jumps: bool


def rate_change(old: Schedule, new: Schedule, step: int) -> RateChange:
    """step: steps taken, one or more."""
    before, after = old(step - 1), new(step)
    low, high = sorted((before, old(step)))
    return RateChange(before, after, jumps=not 0.9 * low <= after <= 1.1 * high)


def with_duration(config: Config, duration: Duration) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"duration": duration})})


def checkpoint_before(run: str | Path, step: int) -> Checkpoint | None:
    """The newest whole checkpoint of a run's folder after at most so many steps."""
    found = Repository(Path(run) / "checkpoints").checkpoints()
    return next((one for one in reversed(found) if one.step <= step and one.manifest), None)


def extension_notice(config: Config, saved: Manifest, new: Schedule, steps_per_epoch: int) -> str | None:
    """The rate before and after, where a run of another train.duration is continued; None where it is the same one.

    saved: of the checkpoint to continue from. Its config means the same as `config`, so that only the length may differ.
    """
    duration, step = saved.config.get("train", {}).get("duration"), saved.step
    if duration is None or not 0 < step < new.total:
        return None
    old = resolve(with_duration(config, Duration.parse(duration)), steps_per_epoch)
    if old == new:
        return None
    change = rate_change(old, new, step)
    text = (
        f"train.duration was {old.total:,} steps and is {new.total:,}: the learning rate was {change.before:.3g} at step "
        f"{step:,} and is {change.after:.3g} at step {step + 1:,}"
    )
    if not change.jumps:
        return text
    if old.type == "wsd" and step > old.decay_start:
        kept = checkpoint_before(config.run_dir, old.decay_start)
        advice = f"The decay began after step {old.decay_start:,}. To train longer, go on from before it: " + (
            f"copy {kept.address} to RUN_DIR/checkpoints/ of another folder and train with name and run_dir of its own"
            if kept
            else "but no checkpoint from before it is here"
        )
    else:
        advice = (
            f"This {old.type} schedule depends on the length of the run. To train on at the last rate, start another run with "
            f"init_from={config.run_dir} optimizer.lr={change.before:.3g} schedule.type=constant; to follow the schedule over "
            "the whole length, start anew with --fresh"
        )
    return f"WARNING: {text}, which is a jump. {advice}"


def longer_run(
    config: Config, schedule: Schedule, steps_per_epoch: int, command: str, arguments: Sequence[str]
) -> list[str]:
    """Commands, with a comment, that train a complete run for twice as long without a jump of the rate.

    command: `llmtrain train`. arguments: of this run.
    """
    duration = Duration(2 * config.train.duration.value, config.train.duration.unit)
    twice = _replaced(arguments, f"train.duration={duration}")
    change = rate_change(schedule, resolve(with_duration(config, duration), steps_per_epoch), schedule.total)
    if not change.jumps:
        return [f"{command} {quoted(twice)}   # resume, and train on"]
    kept = checkpoint_before(config.run_dir, schedule.decay_start) if schedule.type == "wsd" else None
    if kept is None:
        why = f"resuming would take the learning rate from {change.before:.3g} to {change.after:.3g}"
        return [f"{command} --fresh {quoted(twice)}   # anew, twice as long; {why}"]
    name, folder = f"{config.name}-longer", f"{config.run_dir}-longer"
    apart = [f"name={name}", f"run_dir={folder}"]
    if config.checkpoint.remote and config.name not in config.checkpoint.remote:
        apart.append(f"checkpoint.remote={config.checkpoint.remote}-longer")
    root = shlex.quote(f"{folder}/checkpoints")
    return [
        f"mkdir -p {root} && cp -r {shlex.quote(kept.address)} {root}",
        f"{command} {quoted(_replaced(twice, *apart))}   # train on, from before the decay",
    ]


def _replaced(arguments: Sequence[str], *overrides: str) -> list[str]:
    """The arguments with these overrides, in place of any of the same keys."""
    keys = {override.partition("=")[0] for override in overrides}
    return [*(word for word in arguments if word.partition("=")[0] not in keys), *overrides]


def quoted(arguments: Sequence[str]) -> str:
    """The arguments for a shell, of an override only its value in quotation marks."""
    parts = [word.partition("=") for word in arguments]
    return " ".join(f"{shlex.quote(key)}{is_}{shlex.quote(value) if is_ else ''}" for key, is_, value in parts)
