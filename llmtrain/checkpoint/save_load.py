"""Save and load a sharded model and its optimizer, by parameter name, through torch's distributed checkpoint.

A save goes to `step-N.partial`: files are hashed while they are written, flushed, and listed in the manifest, which
comes last; only then the folder takes its name. A folder of that name is whole.
"""

import contextlib
import uuid
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from llmtrain.checkpoint.beneath import Beneath, Layer, open_stack
from llmtrain.checkpoint.collective import first_failure, on_every_rank, verify_in_shares
from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.divided_tensor import DividedTensor
from llmtrain.checkpoint.format.manifest import Base, CheckpointError, FileRecord, Manifest
from llmtrain.checkpoint.format.storage import ShardReader, ShardWriter, StatePlanner, ValuePlanner
from llmtrain.checkpoint.local import PARTIAL, clear, folder_name, replace
from llmtrain.checkpoint.repository import Repository
from llmtrain.checkpoint.retention import Retention
from llmtrain.config.checksums import checksum
from llmtrain.config.output_folder import write_synced
from llmtrain.errors import RunError
from llmtrain.models.parameters import parameter_info
from llmtrain.models.slices import local_of
from llmtrain.models.tensor_parallel import slices_of
from llmtrain.versions import versions

# Optimizer groups by parameter name rather than by index: they survive another grouping or another rank count.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
# Settings of how this machine computes the step: a checkpoint of a GPU must not ask a CPU for a fused kernel.
MACHINE_SETTINGS = (".foreach", ".fused", ".capturable", ".differentiable")


class Part(Protocol):
    """Something else that a checkpoint holds beside parameters and optimizer, under names of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors (sharded in any way, loaded in place) and plain values, which the part does not change afterwards."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SaveError(CheckpointError):
    """A checkpoint could not be written; earlier ones stay as they were."""

    status = RunError.status


@dataclass(frozen=True)
class RunState:
    """State of the run that the manifest holds beside the tensors: see Manifest."""

    step: int
    tokens: int
    config: dict[str, Any]
    clock: dict[str, Any]
    data: dict[str, Any]
    more_files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that the checkpoint holds besides, by name."""


def write(
    root: Path,
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    run: RunState,
    retention: Retention,
    group: dist.ProcessGroup | None = None,
    base: Base | None = None,
) -> Path:
    """Write one checkpoint, of the state as it is sharded, with `tensors` as this rank's data. Called by every rank.

    base: the checkpoint that has the parameters which the state leaves out.
    group: coordinates the ranks; a group of its own when this runs beside training.
    Returns the folder. Raises SaveError, on every rank, when any rank could not write (a full disk, say).
    """
    final = root / folder_name(run.step)
    partial = final.with_name(final.name + PARTIAL)
    main = dist.get_rank(group) == 0
    save_id = _common_id(group)
    writer = ShardWriter(partial, save_id)
    published = False

    def publish() -> None:
        nonlocal published
        files = {**writer.files, **{name: _write_file(partial / name, text) for name, text in run.more_files.items()}}
        written = Manifest(
            save_id=save_id,
            step=run.step,
            tokens=run.tokens,
            config=run.config,
            clock=run.clock,
            data=run.data,
            versions=versions("torch", "mosaicml", "mosaicml-streaming"),
            files=dict(sorted(files.items())),
            base=base,
        )
        manifests.write(partial, written)
        replace(partial, final)
        published = True
        Repository(root).prune(retention)

    try:
        on_every_rank(lambda: clear(partial, make=True) if main else None, f"cannot create {partial}", group, SaveError)
        on_every_rank(
            lambda: dcp.save(dict(state), storage_writer=writer, planner=StatePlanner(tensors), process_group=group),
            f"could not write {partial}",
            group,
            SaveError,
        )
        on_every_rank(lambda: publish() if main else None, f"could not complete {final}", group, SaveError)
    except SaveError:
        if main:  # a full disk stays full while half a checkpoint lies on it
            with contextlib.suppress(OSError):
                clear(partial)
        raise
    except (
        RuntimeError
    ):  # of the group: a rank is gone, and training will fail for it; a published checkpoint is complete
        if not published:
            raise
    return final


def _write_file(path: Path, content: bytes) -> FileRecord:
    write_synced(path, content)
    return {"bytes": len(content), "xxh3_128": checksum(content)}


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    manifest: Manifest | None = None,
    verify: bool = True,
    verify_base: bool | None = None,
    parts: Sequence[Part] = (),
    ema: bool = False,
) -> None:
    """Load parameters, and optimizer state if an optimizer is given, into a model sharded in any way; and `parts`. Called by
    every rank.

    ema: the moving averages of the trained parameters in their place.

    verify: compare the hashes of the files that are read, each rank those of a share of them. verify_base: of checkpoints beneath
    this one; default: as verify.
    Raises CheckpointError, on every rank, for a file that is missing or damaged, tensors that do not fit, and a checkpoint beneath
    that is not there.
    """
    stack = stack_of(folder, manifest or manifests.read(folder))
    if ema:
        indexes.require_average(folder, stack[0].index)
    full = _full_state(model, optimizer)
    own = [_divided(model, part.state_dict()) for part in parts]
    state = {name: value for name, value in full.items() if not name.endswith(MACHINE_SETTINGS)}
    for found in own:
        state |= found
    averaged = {f"model.{info.name}": f"ema.{info.name}" for info in parameter_info(model).values() if info.trainable}
    stored = {averaged.get(name, name) if ema else name: name for name in state}
    read = {name: state[own] for name, own in stored.items()}
    load_state(stack, read, verify=verify, verify_base=verify_base)
    state = {stored[name]: value for name, value in read.items()}
    for part, found in zip(parts, own, strict=True):
        part.load_state_dict({name: state[name] for name in found})
    found_state = {
        name: value.tensor if isinstance(value, DividedTensor) else value for name, value in (full | state).items()
    }
    set_model_state_dict(model, _part(found_state, "model."))
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, _part(found_state, "optimizer."), options=_BY_NAME)


def stack_of(folder: Path, manifest: Manifest) -> list[Layer]:
    """A checkpoint and those beneath it. Called by every rank; raises CheckpointError on all."""
    stack: list[Layer] = []
    on_every_rank(lambda: stack.extend(open_stack(folder, manifest)))
    return stack


def load_state(stack: Sequence[Layer], state: dict[str, Any], *, verify: bool, verify_base: bool | None = None) -> None:
    """Load into a flat state dict: its tensors in place. A parameter comes from the uppermost checkpoint that has it, everything
    else from the first. Called by every rank; raises CheckpointError on all. verify, verify_base: as for `load`."""
    rest = dict(state)
    for number, layer in enumerate(stack):
        lowest = number == len(stack) - 1
        here = {
            name: value
            for name, value in rest.items()
            if lowest or name in layer.index.tensors or (number == 0 and not name.startswith("model."))
        }
        rest = {name: value for name, value in rest.items() if name not in here}
        if anywhere(bool(here)):  # a stage of a pipeline may need nothing of it
            _load_layer(layer, here, verify if number == 0 or verify_base is None else verify_base)
            state.update(here)


def anywhere(here: bool) -> bool:
    """True if it is true of some rank. Called by every rank."""
    if not dist.is_initialized():
        return here
    found = [here] * dist.get_world_size()
    dist.all_gather_object(found, here)
    return any(found)


def _load_layer(layer: Layer, state: dict[str, Any], verify: bool) -> None:
    if verify:
        verify_in_shares(layer.folder, layer.manifest, layer.index.files(state))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process, without a group
        warnings.filterwarnings("ignore", message="Detected mismatched keys")  # of the stages of a pipeline
        try:
            dcp.load(state, storage_reader=ShardReader(layer.folder, layer.index), planner=ValuePlanner())
        except CheckpointException as error:
            raise CheckpointError(f"{layer.folder} cannot be loaded: {first_failure(error)[1]}") from error


def flat_state(model: nn.Module, optimizer: torch.optim.Optimizer | None, parts: Sequence[Part] = ()) -> dict[str, Any]:
    """{model.NAME: tensor, optimizer.state.NAME.exp_avg: tensor, optimizer.param_groups.NAME.lr: number, ...}, sharded; what
    tensor-parallel ranks divide is a DividedTensor."""
    full = _full_state(model, optimizer)
    state = {name: value for name, value in full.items() if not name.endswith(MACHINE_SETTINGS)}
    for part in parts:
        state |= _divided(model, part.state_dict())
    return state


def _full_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state = {f"model.{name}": _plain(value) for name, value in get_model_state_dict(model).items()}
    if optimizer is not None:
        found = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
        state |= {f"optimizer.{name}": value for name, value in found.items()}
    return _divided(model, state)


def _divided(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with a DividedTensor for whatever is as large as what this rank holds of a parameter that ranks divide."""
    slices, divided = slices_of(model), dict(state)
    for name, value in state.items() if slices else ():
        of = next((of for prefix in _PREFIXES if (of := slices.get(_parameter(name, prefix)))), None)
        if of is not None and isinstance(value, Tensor) and value.ndim > of.dim and value.shape[of.dim] == of.length:
            divided[name] = DividedTensor(value, of)
    return divided


_PREFIXES = ("model.", "ema.", "optimizer.state.")


def _parameter(name: str, prefix: str) -> str:
    """The parameter that an entry of a state is about, if it begins so; a moment's own name comes behind the parameter's."""
    if not name.startswith(prefix):
        return ""
    name = name.removeprefix(prefix)
    return name.rpartition(".")[0] if prefix == "optimizer.state." else name


def _plain(tensor: Any) -> Any:
    """A sharded parameter over the same memory, without a wrapper around this rank's part: FSDP2 gathers through such wrappers in
    another format (float8)."""
    if not isinstance(tensor, DTensor) or not is_traceable_wrapper_subclass(local := tensor.to_local()):
        return tensor
    (inner, *_), _ = local.__tensor_flatten__()
    plain = getattr(local, inner)
    assert plain.shape == local.shape and plain.dtype == local.dtype, inner
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(plain, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def beneath_of(model: nn.Module, base: Base | None, held: Container[str]) -> Beneath | None:
    """Parameters that a run's checkpoints may leave out; None where they hold all. held: names that `base` does not have."""
    frozen = [info.name for info in parameter_info(model).values() if not info.trainable]
    names = frozenset(name for name in frozen if f"model.{name}" not in held)
    return Beneath(base, names) if base is not None and names else None


def local_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """This rank's part of every tensor of a state, not copied."""
    return {
        name: value.local if isinstance(value, DividedTensor) else local_of(value)
        for name, value in state.items()
        if isinstance(value, (Tensor, DividedTensor))
    }


def _common_id(group: dist.ProcessGroup | None) -> str:
    ids = [str(uuid.uuid4())]
    dist.broadcast_object_list(ids, group_src=0, group=group)
    return ids[0]


def _part(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
