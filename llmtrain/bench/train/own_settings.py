"""Settings of a run that a sweep makes itself: its `settings` may not have them. No torch here."""

from collections.abc import Iterator, Sequence

from llmtrain.config.base import Problem

_DATA = "is Python's standard library in every run; leave it out"
_UNSEEN = "has no part in the steps that are measured; leave it out"
_OWN = {
    "name": "is made of model, length, GPUs and precision; rename the model's YAML",
    "run_dir": "is in the folder of the results; use --out",
    "data.train": _DATA,
    "data.validation": _DATA,
    "data.prepare": _DATA,
    "data.seq_len": "is of the sweep; use seq_lens",
    "train.precision": "is of the sweep; use precisions",
    "train.float8": "is of the sweep; use precisions",
    "train.duration": "is of the sweep; use steps and warmup",
    "schedule": "is constant in every run; leave it out",
    "eval.interval": _UNSEEN,
    "checkpoint": _UNSEEN,
    "logging": _UNSEEN,
}
"""Keys, each with what to do instead."""


def key_of(setting: str) -> str:
    return setting.partition("=")[0].strip()


def own_setting_problems(settings: Sequence[str], *, batch: bool, float8: bool) -> Iterator[Problem]:
    """Settings that would contradict what the sweep says of its runs.

    batch: True if batch_tokens sets the batch. float8: True if every precision is a recipe, whose details may be set.
    """
    own = _OWN | (
        {"train.global_batch_size": "is of batch_tokens, which is given too; use one of the two"} if batch else {}
    )
    for i, setting in enumerate(settings):
        if "=" not in setting:
            yield Problem(f"settings.{i}", setting, "is no setting; write a.b=c")
        elif wrong := _wrong(key_of(setting), own, float8):
            yield Problem(f"settings.{i}", None, wrong)


def _wrong(key: str, own: dict[str, str], float8: bool) -> str | None:
    if float8 and key.startswith("train.float8.") and key != "train.float8.recipe":
        return None
    for one, instead in own.items():
        if key == one or key.startswith(f"{one}."):
            return f"{key} {instead}"
    if below := [one for one in own if one.startswith(f"{key}.")]:
        return f"{key} as a whole would replace {', '.join(below)}, which the sweep sets; write {key}.KEY=VALUE"
    return None
