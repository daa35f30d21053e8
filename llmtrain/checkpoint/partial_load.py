"""Load all of a checkpoint's parameters or some into a new run, with or without their optimizer state."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from llmtrain.checkpoint.format.divided_tensor import DividedTensor
from llmtrain.checkpoint.format.index import Index
from llmtrain.checkpoint.format.manifest import CheckpointError, Manifest
from llmtrain.checkpoint.save_load import anywhere, flat_state, load_state, stack_of
from llmtrain.checkpoint.upcycling import copy_to_experts
from llmtrain.errors import first_few
from llmtrain.models.init import clean_name
from llmtrain.models.slices import local_of
from llmtrain.schema.init_from import InitialWeights

_STATE = "optimizer.state."


@dataclass(frozen=True)
class Loaded:
    """Names of the parameters of the model that were loaded (taken) or not (fresh), and of the checkpoint's that were skipped."""

    folder: Path
    taken: list[str]
    fresh: list[str]
    skipped: list[str]
    optimizer: bool

    def summary(self) -> str:
        what = "weights and optimizer state" if self.optimizer else "weights"
        lines = [f"starting from {self.folder}: {what} of {len(self.taken)} parameters"]
        if self.fresh:
            lines.append(f"  left fresh, {len(self.fresh)} of the model: {first_few(self.fresh, 8)}")
        if self.skipped:
            lines.append(f"  skipped, {len(self.skipped)} of the checkpoint: {first_few(self.skipped, 8)}")
        return "\n".join(lines)


def together(found: Sequence[Loaded]) -> Loaded:
    """Names of all that ranks which hold parts of one model have loaded."""
    taken = list(dict.fromkeys(name for one in found for name in one.taken))
    fresh = list(dict.fromkeys(name for one in found for name in one.fresh))
    skipped = set.intersection(*(set(one.skipped) for one in found))
    return replace(found[0], taken=taken, fresh=fresh, skipped=sorted(skipped))


def load_part(
    folder: Path,
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    wanted: InitialWeights,
    *,
    verify: bool,
    added: Collection[str] = (),
    seed: int = 0,
) -> Loaded:
    """Load what is wanted into a model with fresh weights and an optimizer without state. Called by every rank.

    seed: of what upcycling draws. added: names of parameters that the model has by `adapt`, and the checkpoint need not have.

    Raises CheckpointError, with every parameter that is missing or of another shape where `strict`, for a pattern that
    matches no parameter, and for an optimizer state that is not there.
    """
    stack = stack_of(folder, manifest)
    index = stack[0].index
    for layer in stack[1:]:
        beneath = {name: found for name, found in layer.index.tensors.items() if name.startswith("model.")}
        index = replace(index, tensors=beneath | index.tensors)
    shapes = {name.removeprefix("model."): tuple(value.shape) for name, value in flat_state(model, None).items()}
    copied = _upcycled(shapes, index) if wanted.upcycle else {}
    layers = tuple(f"{name.partition('.experts.')[0]}." for name in copied)
    fresh = {name for name in shapes if name.startswith(layers) and ".experts." not in name}  # routers
    taken = _choose(folder, shapes, index, wanted, {*added, *fresh, *copied}, getattr(model, "is_whole", True))
    weights = {name: value for name, value in flat_state(model, None).items() if name.removeprefix("model.") in taken}
    load_state(stack, weights, verify=verify)
    state, experts = flat_state(model, None), list(copied)
    while anywhere(bool(experts)):  # stages of a pipeline have different numbers of them
        name = experts.pop(0) if experts else None
        dense = {} if name is None else {f"model.{copied[name]}": torch.empty(shapes[name][1:])}
        load_state(stack, dense, verify=verify)
        if name is not None:
            value, [whole] = state[f"model.{name}"], dense.values()
            tensor, slices = (value.tensor, value.slices) if isinstance(value, DividedTensor) else (value, None)
            d_ff = shapes[f"{name.rpartition('.')[0]}.w_out"][-1]
            copy_to_experts(tensor, slices, whole, name, d_ff, wanted, seed)
    for name in (name for name in fresh - taken.keys() if ".shared.w_out." in name):
        value = state[f"model.{name}"]  # what stands beside the copies adds nothing at first
        (value.local if isinstance(value, DividedTensor) else local_of(value)).zero_()
    taken |= {name: shapes[name] for name in copied}
    if wanted.optimizer:
        # Asking for the state makes one for every parameter, as a step would; what is not loaded goes again.
        moments = {
            name: value
            for name, value in flat_state(model, optimizer).items()
            if name.startswith(_STATE) and name.removeprefix(_STATE).rpartition(".")[0] in taken
        }
        lacking = [name.removeprefix(_STATE) for name in moments if name not in index.tensors]
        if lacking:
            raise CheckpointError(
                f"init_from: {folder} has no optimizer state {first_few(lacking, 8)}; use optimizer: false"
            )
        load_state(stack[:1], moments, verify=verify)
        for name, parameter in model.named_parameters():
            if clean_name(name) not in taken:
                optimizer.state.pop(parameter, None)
    known = {name.removeprefix("model.") for name in index.tensors if name.startswith("model.")}
    return Loaded(
        folder,
        list(taken),
        fresh=[name for name in shapes if name not in taken],
        skipped=sorted(known - taken.keys() - set(copied.values())),
        optimizer=wanted.optimizer,
    )


_DENSE = {"w_in": "w_in.weight", "w_out": "w_out.weight", "b_in": "w_in.bias", "b_out": "w_out.bias"}
"""Tensors of experts, and those of a dense MLP of which each expert's is a copy."""


def _upcycled(shapes: Mapping[str, tuple[int, ...]], index: Index) -> dict[str, str]:
    """Tensors of the model's experts that begin as copies, and the checkpoint's names of what they are copies of."""
    found = {}
    for name, shape in shapes.items():
        mlp, of_experts, kind = name.rpartition(".experts.")
        dense = index.tensors.get(f"model.{mlp}.{_DENSE.get(kind)}")
        if (
            of_experts
            and dense is not None
            and tuple(dense.shape) == shape[1:]
            and f"model.{name}" not in index.tensors
        ):
            found[name] = f"{mlp}.{_DENSE[kind]}"
    return found


def _choose(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    index: Index,
    wanted: InitialWeights,
    added: Collection[str],
    whole: bool,
) -> dict[str, tuple[int, ...]]:
    """The parameters to take, with their shapes. whole: these are the model's, of which a stage of a pipeline may take none."""
    for pattern in wanted.parameters if whole else ():
        if not any(fnmatchcase(name, pattern) for name in shapes):
            raise CheckpointError(f"init_from.parameters: {pattern} matches no parameter of the model")
    taken, wrong = {}, []
    for name, shape in shapes.items():
        if not any(fnmatchcase(name, pattern) for pattern in wanted.parameters):
            continue
        found = index.tensors.get(f"model.{name}")
        if found is None and name in added:
            continue
        if found is None:
            wrong.append(f"{name} is missing")
        elif tuple(found.shape) != shape:
            wrong.append(f"{name} has shape {found.shape}, not {list(shape)}")
        else:
            taken[name] = shape
    if wrong and wanted.strict:
        raise CheckpointError(
            f"init_from: {folder} does not hold what was asked for (strict: false leaves it fresh):\n  "
            + first_few(wrong, 20, "\n  ")
        )
    if whole and not taken:
        raise CheckpointError(f"init_from: nothing in {folder} fits: {first_few(wrong, 8)}")
    return taken
