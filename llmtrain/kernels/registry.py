"""Backends of every operation. A backend is chosen once, when the model is built; the choice needs no torch.

To add a backend: a file with `build(spec, platform, variant)` beside the reference, a refusal in the
operation's spec.py, a line in the table below, and its place in the operation's `preference`. Attention's are measured over
the grid of benchmarks/ too: see attention/measured.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from llmtrain.errors import UserError
from llmtrain.kernels.attention import spec as attention
from llmtrain.kernels.conv1d import spec as conv1d
from llmtrain.kernels.experts import spec as experts
from llmtrain.kernels.gated_delta import spec as gated_delta
from llmtrain.kernels.gated_norm import spec as gated_norm
from llmtrain.kernels.kimi_delta import spec as kimi_delta
from llmtrain.kernels.mamba3 import spec as mamba3
from llmtrain.kernels.mamba_mixer import spec as mamba_mixer
from llmtrain.kernels.norm import spec as norm
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.refusals import refuse_triton
from llmtrain.kernels.rotary import spec as rotary
from llmtrain.kernels.ssd import spec as ssd

if TYPE_CHECKING:
    from llmtrain.kernels.attention.measured import Choice

Operation = Literal[
    "attention", "rotary", "norm", "ssd", "conv1d", "gated_norm", "mamba_mixer", "gated_delta", "kimi_delta", "mamba3",
    "experts", "attention_step", "ssd_step", "conv1d_step", "mamba3_step",
]  # fmt: skip
Spec = Any
"""AttentionSpec, RotarySpec, NormSpec, SSDSpec, Conv1dSpec, GatedNormSpec, MambaMixerSpec, GatedDeltaSpec, KimiDeltaSpec,
Mamba3Spec or ExpertsSpec, by operation."""


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation.

    name: `family` or `family:variant`.
    module: below llmtrain.kernels; imported only when the backend is built.
    refusal: (spec, platform) -> why it cannot serve, or None (of a reference always); `refusal` below adds those that can.
        platform=None asks only for reasons that hold on every machine.
    saved_ops: names of its operators whose outputs selective checkpointing keeps, since they are costly to compute and
        cheap to keep. As str() of a torch operator, without importing torch.
    named_only: neither `auto` nor a family means it; it changes what others in its process compute with, say.
    """

    name: str
    module: str
    refusal: Callable[[Spec, Platform | None], str | None] = lambda spec, platform: None
    saved_ops: tuple[str, ...] = ()
    named_only: bool = False

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]

    def build(self, spec: Spec, platform: Platform) -> Any:
        """The kernel: a callable with the operation's signature; for attention also `prepare(seq_len, device)`."""
        return importlib.import_module(f"llmtrain.kernels.{self.module}").build(
            spec, platform, self.name.partition(":")[2]
        )


def _refuse_triton_step(spec: Spec, platform: Platform | None) -> str | None:
    return refuse_triton(spec.dtype, platform)


def _op(name: str) -> str:
    return f"llmtrain.{name}.default"


_SUFFIX = _op("attention_suffix")  # for some backends, with train.parallel.context


def _sdpa_op(kernel: str) -> tuple[str, ...]:
    return (f"aten._scaled_dot_product_{kernel}.default", _SUFFIX)


_BACKENDS: dict[str, tuple[Backend, ...]] = {
    "attention": (
        Backend("reference", "attention.reference"),
        Backend("sdpa:flash", "attention.sdpa", attention.refuse_sdpa_flash, _sdpa_op("flash_attention")),
        Backend("sdpa:cudnn", "attention.sdpa", attention.refuse_sdpa_cudnn, _sdpa_op("cudnn_attention")),
        Backend("sdpa:efficient", "attention.sdpa", attention.refuse_sdpa_efficient, _sdpa_op("efficient_attention")),
        Backend("sdpa:cpu", "attention.sdpa", attention.refuse_sdpa_cpu, _sdpa_op("flash_attention_for_cpu")),
        Backend("flex", "attention.flex", attention.refuse_flex, ("flex_attention",)),
        Backend("varlen", "attention.varlen", attention.refuse_varlen, ("torch_attn._varlen_attn.default",)),
        Backend("triton", "attention.triton", attention.refuse_triton_sequence, (_op("attention_forward"), _SUFFIX)),
        Backend(
            "triton_float8",
            "attention.float8",
            attention.refuse_triton_float8,
            (_op("attention_float8_forward"),),
            named_only=True,
        ),
        # Third-party packages: in no preference, so `auto` does not take them unless the user has measured them here.
        Backend("flash_attn", "attention.flash_attn", attention.refuse_flash_attn),
        Backend(
            "sdpa:flash3", "attention.sdpa", attention.refuse_sdpa_flash3, _sdpa_op("flash_attention"), named_only=True
        ),
        Backend(
            "sdpa:flash4", "attention.sdpa", attention.refuse_sdpa_flash4, _sdpa_op("flash_attention"), named_only=True
        ),
    ),
    "rotary": (
        Backend("reference", "rotary.reference"),
        Backend("triton", "rotary.triton", rotary.refuse_triton_pairs),
    ),
    "norm": (
        Backend("reference", "norm.reference"),
        Backend("triton", "norm.triton", norm.refuse_triton_rows),
    ),
    "ssd": (
        Backend("reference", "ssd.reference"),
        Backend("triton", "ssd.triton", ssd.refuse_triton_scan),
        Backend("mamba_ssm", "ssd.mamba_ssm", ssd.refuse_mamba_ssm),
    ),
    "conv1d": (
        Backend("reference", "conv1d.reference"),
        Backend("aten", "conv1d.aten", conv1d.refuse_aten),
        Backend("triton", "conv1d.triton", conv1d.refuse_triton_sequence),
        Backend("causal_conv1d", "conv1d.causal_conv1d", conv1d.refuse_causal_conv1d),
    ),
    "gated_norm": (
        Backend("reference", "gated_norm.reference"),
        Backend("triton", "gated_norm.triton", gated_norm.refuse_triton_rows),
        Backend("mamba_ssm", "gated_norm.mamba_ssm", gated_norm.refuse_mamba_ssm),
    ),
    # The three of a Mamba-2 mixer as one, for training.
    "mamba_mixer": (
        Backend("reference", "mamba_mixer.reference"),
        Backend("triton", "mamba_mixer.triton", mamba_mixer.refuse_triton),
    ),
    "gated_delta": (
        Backend("reference", "gated_delta.reference"),
        Backend("triton", "gated_delta.triton", gated_delta.refuse_triton_chunks, (_op("gated_delta_forward"),)),
        Backend("fla", "gated_delta.fla", gated_delta.refuse_fla, (_op("fla_gated_delta_forward"),)),
    ),
    "kimi_delta": (
        Backend("reference", "kimi_delta.reference"),
        Backend("triton", "kimi_delta.triton", kimi_delta.refuse_triton_chunks, (_op("kimi_delta_forward"),)),
        Backend("fla", "kimi_delta.fla", kimi_delta.refuse_fla, (_op("fla_kimi_delta_forward"),)),
    ),
    "mamba3": (
        Backend("reference", "mamba3.reference"),
        Backend("triton", "mamba3.triton", mamba3.refuse_triton_rotations, (_op("mamba3_forward"),)),
    ),
    "experts": (
        Backend("reference", "experts.reference"),
        Backend("grouped_mm", "experts.grouped_mm", experts.refuse_grouped_mm),
        Backend("triton", "experts.triton", experts.refuse_triton_rows, (_op("experts_forward"),)),
    ),
    # One new token per row, for decoding from a cache.
    "attention_step": (
        Backend("reference", "attention.step"),
        Backend("triton", "attention.step_triton", attention.refuse_triton_step),
    ),
    "ssd_step": (
        Backend("reference", "ssd.step"),
        Backend("triton", "ssd.step_triton", _refuse_triton_step),
    ),
    "conv1d_step": (
        Backend("reference", "conv1d.step"),
        Backend("triton", "conv1d.step_triton", _refuse_triton_step),
    ),
    "mamba3_step": (
        Backend("reference", "mamba3.step"),
        Backend("triton", "mamba3.step_triton", _refuse_triton_step),
    ),
}
_PREFERENCE: dict[str, Callable[[Spec, Platform], tuple[str, ...]]] = {
    "attention": attention.preference,
    "rotary": rotary.preference,
    "norm": norm.preference,
    "ssd": ssd.preference,
    "conv1d": conv1d.preference,
    "gated_norm": gated_norm.preference,
    "mamba_mixer": mamba_mixer.preference,
    "gated_delta": gated_delta.preference,
    "kimi_delta": gated_delta.preference,
    "mamba3": ssd.preference,
    "experts": experts.preference,
    "attention_step": ssd.preference,
    "ssd_step": ssd.preference,
    "conv1d_step": ssd.preference,
    "mamba3_step": ssd.preference,
}
# A config that names a third-party scan gets that package's convolution and norm too.
_BELONGS = {"mamba_ssm": ("causal_conv1d", "reference")}
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


@dataclass(frozen=True)
class Row:
    """One line of the support table: `reason` is None when the backend can serve."""

    operation: str
    backend: str
    reason: str | None


def table(operation: Operation, spec: Spec, platform: Platform | None) -> list[Row]:
    """Backends of an operation with their reasons to refuse, if any."""
    return [Row(operation, b.name, b.refusal(spec, platform)) for b in _BACKENDS[operation]]


def refusal(operation: Operation, name: str, spec: Spec, platform: Platform | None = None) -> str | None:
    """Reason for which `name` (a backend, a family such as `sdpa`, or `auto`) cannot serve, with those that can; None if it can."""
    reasons = {b.name: b.refusal(spec, platform) for b in _candidates(operation, name)}
    if None in reasons.values():
        return None
    # The reason given for a family is that of its preferred member.
    order = _PREFERENCE[operation](spec, platform) if platform else ()
    closest = next((b for b in order if b in reasons), next(iter(reasons)))
    others = [row.backend for row in table(operation, spec, platform) if row.reason is None]
    able = ", ".join(["auto", *others])
    where, others_can = (" here", "can serve") if platform else ("", "can serve, where the machine has them")
    return f"{operation} backend '{name}' cannot serve{where}: {reasons[closest]} ({others_can}: {able})"


def resolve(operation: Operation, name: str, spec: Spec, platform: Platform, seq_len: int | None = None) -> Backend:
    """The backend that `name` means on this platform: itself, or of a family or of all (`auto`) the one that was measured to
    be the fastest, else the first in the operation's preference.

    seq_len: the length that the fastest is asked for; None: not known. Raises UserError when `name` cannot serve, saying why
    and what can.
    """
    if reason := refusal(operation, name, spec, platform):
        raise UserError(reason)
    able = {b.name: b for b in _candidates(operation, name) if b.refusal(spec, platform) is None}
    if rows := measured(operation, name, spec, platform, seq_len):
        return able[rows[0].backend]
    ranked = [able[b] for b in _PREFERENCE[operation](spec, platform) if b in able]
    return (ranked or list(able.values()))[0]


def measured(
    operation: Operation, name: str, spec: Spec, platform: Platform, seq_len: int | None = None
) -> list[Choice]:
    """Times that `resolve` chooses by, the one to take first; none where no measured cells apply to the spec."""
    candidates = _candidates(operation, name)
    if operation != "attention" or len(candidates) == 1:
        return []
    from llmtrain.kernels.attention.measured import fastest  # not above: `check` needs no models of tuning tables

    able = {b.name for b in candidates if b.refusal(spec, platform) is None}
    return fastest(spec, able, platform, seq_len)


def resolve_beside(operation: Operation, name: str, spec: Spec, platform: Platform) -> Backend:
    """Backend for an operation next to another whose backend is `name`: its own of that name, or of the same package, if it has
    one that can serve here, else what `auto` means.
    """
    for wanted in (name, *_BELONGS.get(name, ())):
        named = any(wanted in (b.name, b.family) for b in _BACKENDS[operation])
        if named and refusal(operation, wanted, spec, platform) is None:
            return resolve(operation, wanted, spec, platform)
    return resolve(operation, "auto", spec, platform)


def saved_ops(operation: Operation, name: str) -> set[str]:
    """Operators that selective checkpointing keeps of any backend that `name` may mean (see Backend.saved_ops)."""
    return {op for backend in _candidates(operation, name) for op in backend.saved_ops}


def _candidates(operation: Operation, name: str) -> list[Backend]:
    backends = _BACKENDS[operation]
    found = [b for b in backends if name == b.name or (name in ("auto", b.family) and not b.named_only)]
    if not found:
        names = sorted({"auto", *(b.name for b in backends), *(b.family for b in backends)})
        raise UserError(f"no {operation} backend named '{name}'; there is {', '.join(names)}")
    return found
