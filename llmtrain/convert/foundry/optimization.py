"""LLM Foundry's `optimizer`, `scheduler` and `algorithms`, as ours."""

import math
import re
from dataclasses import dataclass
from typing import Any

from llmtrain.config.base import Duration
from llmtrain.convert.foundry.settings import Settings

_TIME = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([a-z]+)\s*")


def read_duration(text: object, batch_size: int | None) -> Duration | None:
    """A Composer time; a bare number is epochs, samples become steps of `batch_size`. None for one that ours cannot say."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return Duration(float(text), "epochs")
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    if not match:
        return None
    value, unit = float(match[1].replace("_", "").replace(",", "")), match[2]
    if unit == "sp":
        return Duration(float(math.ceil(value / batch_size)), "steps") if batch_size else None
    if unit == "dur":
        return Duration(value, "fraction") if value <= 1 else None
    ours = {"ba": "steps", "tok": "tokens", "ep": "epochs"}.get(unit)
    return Duration(value, ours) if ours else None  # type: ignore[arg-type]


def take_duration(settings: Settings, key: str, batch_size: int | None, default: str | None = None) -> Duration | None:
    """The length under a key; None where there is none, with a note where it cannot be said."""
    value = settings.take(key, (str, int, float), default)
    if value is None:
        return None
    read = read_duration(value, batch_size)
    if read is None:
        settings.left(key, "is no length that ours has: steps, tokens, epochs or % of the run")
    return read


def same_length(a: Duration, b: Duration, tokens_per_step: int | None) -> bool:
    """True if two lengths are certainly equal."""
    return a == b or (None not in (x := in_steps(a, tokens_per_step), y := in_steps(b, tokens_per_step)) and x == y)


def in_steps(length: Duration, tokens_per_step: int | None) -> float | None:
    """Steps of a length, as far as they are known without data."""
    if length.unit == "steps":
        return length.value
    if length.unit == "tokens" and tokens_per_step:
        return math.ceil(length.value / tokens_per_step)
    return None


_WHOLE = Duration(1.0, "fraction")
_SHAPES = {
    "cosine_with_warmup": "cosine",
    "linear_decay_with_warmup": "linear",
    "constant_with_warmup": "constant",
    "inv_sqrt_with_warmup": "inverse_sqrt",
}


@dataclass(frozen=True)
class Length:
    """Length of a run, and of its steps. batch: sequences; tokens_per_step: None where a batch or sequence is not known."""

    total: Duration | None
    batch: int | None
    tokens_per_step: int | None

    def share(self, part: Duration) -> float | None:
        """part / whole run, as far as it is known without data."""
        if part.unit == "fraction":
            return part.value
        if self.total is None:
            return None
        if part.unit == self.total.unit:
            return part.value / self.total.value if self.total.value else None
        steps, whole = in_steps(part, self.tokens_per_step), in_steps(self.total, self.tokens_per_step)
        return steps / whole if steps is not None and whole else None


def read_optimization(root: Settings, length: Length) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Our `optimizer` and `schedule`, and comments on their keys."""
    optimizer, scheduler = root.section("optimizer"), root.section("scheduler")
    lr, schedule, comments = _schedule(scheduler, optimizer.take("lr", float, 1e-3), length)
    return _optimizer(optimizer, lr, comments), schedule, comments


def _optimizer(optimizer: Settings, lr: float, comments: dict[str, str]) -> dict[str, Any]:
    """lr: the highest rate; `weight_decay` there belongs to the rate that the file names."""
    name = optimizer.take("name", str, "decoupled_adamw")
    named = optimizer.take("lr", float, 1e-3)
    if name != "decoupled_adamw":
        for key in ("name", "lr", "betas", "eps", "weight_decay"):
            if key in optimizer:
                optimizer.left(key, "the optimizer is AdamW, which needs a learning rate and a decay of its own")
        return {"lr": "???", "weight_decay": "???"}
    decay = optimizer.take("weight_decay", float, 1e-5)
    section = {
        "lr": lr,
        "betas": optimizer.take_numbers("betas", [0.9, 0.95]),
        "eps": optimizer.take("eps", float, 1e-8),
        "weight_decay": float(f"{decay / named:.12g}") if named else 0.0,
    }
    if decay:
        comments["weight_decay"] = f"{decay:g} / {named:g}: the same decay per step"
        optimizer.left("weight_decay", "there norms and biases are decayed too; here never")
    return section


def _schedule(scheduler: Settings, lr: float, length: Length) -> tuple[float, dict[str, Any], dict[str, str]]:
    """Peak learning rate, our `schedule`, comments."""
    name = scheduler.take("name", str, "cosine_with_warmup")
    shape = _SHAPES.get(name)
    if shape is None:
        scheduler.left("name", f"schedules are {', '.join(_SHAPES)}; cosine is written")
        shape = "cosine"
    warmup = take_duration(scheduler, "t_warmup", length.batch, "0ba") or Duration(0.0, "steps")
    _check_t_max(scheduler, length)
    peak = lr
    section: dict[str, Any] = {"type": shape, "warmup": str(warmup)}
    if shape in ("cosine", "linear"):
        final, first = scheduler.take("alpha_f", float, 0.0), 1.0
        if shape == "linear":
            first = scheduler.take("alpha_i", float, 1.0)
        peak = lr * first
        section["final_lr_fraction"] = final / first if first else 0.0
        if not first or final > first:
            scheduler.left("alpha_f", "the rate falls from alpha_i; final_lr_fraction: 1 is written")
            peak, section["final_lr_fraction"] = lr * (first or 1.0), 1.0
    elif shape == "constant":
        peak = lr * scheduler.take("alpha", float, 1.0)
    else:
        _inverse_sqrt(scheduler, warmup, length)
        if not warmup.value:
            section = {"type": "constant"}
            scheduler.left("t_warmup", "inverse_sqrt needs a warmup; constant is written")
    share = length.share(warmup)
    if share is None or share <= 1:
        return peak, section, {}
    assert length.total is not None
    scheduler.harmless("t_warmup", f"{warmup} are longer than the run; the part of the rise that it reaches is written")
    comments = {"lr": f"{peak:g} / {share:g}: what a warmup of {warmup} reaches in {length.total}"}
    return float(f"{peak / share:.12g}"), {"type": "constant", "warmup": str(length.total)}, comments


def _check_t_max(scheduler: Settings, length: Length) -> None:
    t_max = take_duration(scheduler, "t_max", length.batch, "1dur")
    total = length.total
    if t_max is None or t_max == _WHOLE or (total and same_length(t_max, total, length.tokens_per_step)):
        return
    scheduler.left(
        "t_max", f"the rate falls until the end of the run ({total}); write train.duration: {t_max} to fall as far"
    )


def _inverse_sqrt(scheduler: Settings, warmup: Duration, length: Length) -> None:
    scale = take_duration(scheduler, "t_scale", length.batch)
    cooldown = take_duration(scheduler, "t_cooldown", length.batch)
    if scale is not None and not same_length(scale, warmup, length.tokens_per_step):
        scheduler.left("t_scale", f"the rate is lr * sqrt(warmup / step); t_scale counts as {warmup}, the warmup")
    if cooldown is not None and cooldown.value:
        scheduler.left("t_cooldown", "there is no cooldown; type: wsd has one")


def read_clipping(root: Settings) -> float | None:
    """Our `train.clip_grad_norm`: none where the file clips nothing."""
    clipping = root.section("algorithms").section("gradient_clipping")
    if not clipping.data:
        return None
    kind, threshold = clipping.take("clipping_type", str, "norm"), clipping.take("clipping_threshold", float, 1.0)
    if kind != "norm":
        clipping.left("clipping_type", "only the norm of all gradients together can be clipped; nothing is")
        return None
    return threshold
