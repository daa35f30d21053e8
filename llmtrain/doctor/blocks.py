"""The report of `llmtrain doctor FILE`: which backend each block takes on this machine, and on which measurement."""

from llmtrain.doctor import selftest
from llmtrain.doctor.report import show
from llmtrain.errors import UserError
from llmtrain.kernels import platform, tuning
from llmtrain.kernels.attention.measured import OURS
from llmtrain.kernels.attention.triton_select import GROUPED
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.tuning_table import KERNELS, searched
from llmtrain.models.backends import Chosen, chosen
from llmtrain.schema.config import Config
from llmtrain.train.machine import missing_units


def run(config: Config, dtype: str | None = None) -> int:
    """Print a row for every kernel of the model, and what else of the config this machine does not have. dtype: None: that of
    train.precision. Returns 1 if there is such a thing, or a named backend that cannot serve here. Raises UserError for an
    unknown dtype."""
    here = platform.detect()
    dtype = dtype or config.train.dtype
    if dtype not in selftest.DTYPES:
        raise UserError(f"--dtype takes {', '.join(selftest.DTYPES)}, not '{dtype}'")
    selftest.check(here)
    found = list(chosen(config.model, here, dtype, config.data.mask_documents))
    rows = [(one.block, one.kernel.operation, one.backend or "none", reason(one, here)) for one in found]
    title = f"{config.name} on {here.device_name or here.arch} ({here.arch}), {dtype}"
    show(title, ("block", "operation", "backend", "because"), list(dict.fromkeys(rows)))
    missing = [f"{problem.path}: {problem.message}" for problem in missing_units(config.train, here)]
    for line in missing:
        print(line)
    return 1 if missing or any(one.backend is None for one in found) else 0


def reason(one: Chosen, here: Platform) -> str:
    """Reason for the choice, in words, and what else decides how it runs."""
    return _reason(one, here) + _stored_dscores(one, here)


def _stored_dscores(one: Chosen, here: Platform) -> str:
    """Note on a backward pass by stored gradients of scores (kernels/attention/stored_dscores.py); empty where there is none."""
    operation, spec, _ = one.kernel
    if operation != "attention" or one.backend != OURS or not spec.plain:
        return ""
    variant = "plain" if spec.n_kv_heads == spec.n_heads else f"plain, {GROUPED}"
    row = tuning.exact("attention.dscores", spec.dtype, {"head_dim": spec.head_dim}, here, variant)
    if row is None:
        return ""
    measured = row.provenance
    by = measured if isinstance(measured, str) else f"{measured['device']}, {measured['date']}"
    return f"; from {row.launch.from_seq_len:,} tokens on backward by stored gradients of scores (fixed row, not tuned: {by})"


def _reason(one: Chosen, here: Platform) -> str:
    operation, _, name = one.kernel
    if one.refusal is not None:
        return one.refusal
    if one.rows:
        best, *others = one.rows
        row, behind = best.nearest, "".join(f"; {other.backend} {other.ms:.3g} ms" for other in others)
        if best.predicted:
            return f"predicted from cells on {row.device}, the nearest {row.label}: {best.ms:.3g} ms{behind}"
        return f"measured on {row.device}, {row.date} ({row.commit}): {best.ms:.3g} ms at {row.label}{behind}"
    if name == one.backend:
        return "named in the YAML"
    if here.vendor == "cpu":
        return "this machine has no GPU"
    if operation == "attention":
        return "not measured: " + ("no public kernel can serve" if one.backend == OURS else "public kernel")
    return launches(one, here) if one.backend == OURS else "PyTorch's: our kernel is not faster here"


def launches(one: Chosen, here: Platform) -> str:
    """Provenance of the launch parameters of our kernel, from the rows that it is launched by."""
    operation, spec, _ = one.kernel
    kernels = searched(operation)
    if not kernels:
        return "ours"
    rows = [
        tuning.select(kernel, spec.dtype, {name: getattr(spec, name) for name in KERNELS[kernel].shape}, here)
        for kernel in kernels
    ]
    said = {
        "compiled only"
        if isinstance(row.provenance, str)
        else f"tuned on {row.provenance['device']}, {row.provenance['date']}"
        for row in rows
    }
    return f"ours, {' and '.join(sorted(said))}: {rows[0].label.replace('.forward', '')}"
