"""The checkpoint that a run takes its first weights from (`init_from`), compared with its model. No torch here."""

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from llmtrain.checkpoint.base import Checkpoint
from llmtrain.checkpoint.format.manifest import CheckpointError, Manifest
from llmtrain.checkpoint.repository import Repository, silent
from llmtrain.config.addresses import is_remote
from llmtrain.config.base import Problem
from llmtrain.models.pattern import parse_pattern
from llmtrain.models.sections.experts import ExpertsSection
from llmtrain.schema.config import Config
from llmtrain.schema.differences import ABSENT, changes, text
from llmtrain.schema.init_from import InitialWeights

# Settings of training, or of weights drawn at random: another value of these still takes the same weights.
_MAY_DIFFER = re.compile(
    r"model\.(dropout|init\..*|blocks\.[^.]+\.(dt_min|dt_max|a_init_range))"
    r"|model\.blocks\.[^.]+\.mlp\.(balance\..*|z_loss|router\.(bias_rate|jitter))"
)


def initial_checkpoint(config: Config) -> Checkpoint:
    """The checkpoint that `config.init_from` names. Raises CheckpointError when it is gone, or of another model."""
    assert config.init_from is not None
    checkpoint = Repository(config.init_from.path).find()
    mismatches = list(_mismatches(config, checkpoint.require()))
    if mismatches:
        lines = "\n".join(f"  {problem.path}: {problem.message}" for problem in mismatches)
        raise CheckpointError(f"init_from: {checkpoint.address} holds another model\n{lines}")
    return checkpoint


def initial_problems(config: Config, fresh: bool) -> Iterator[Problem]:
    """Reasons why `init_from` cannot be used; none once the run has a checkpoint of its own and will continue it."""
    if config.init_from is None:
        return
    path, run_dir = config.init_from.path, Path(config.run_dir)
    if not fresh and Repository(run_dir / "checkpoints").newest(silent):
        return
    if not is_remote(path) and Path(path).expanduser().resolve().is_relative_to(run_dir.resolve()):
        yield Problem("init_from", path, "is the folder of this run; choose another name or run_dir")
        return
    try:
        checkpoint = Repository(path).find()
        manifest = checkpoint.require()
        unmatched = [] if is_remote(path) else _unmatched(config.init_from, checkpoint)
    except CheckpointError as error:
        yield Problem("init_from", path, str(error))
        return
    yield from _upcycling_problems(config, manifest.config["model"])
    for number, pattern in unmatched:
        yield Problem(f"init_from.parameters.{number}", pattern, f"matches no parameter of {checkpoint.address}")
    yield from _mismatches(config, manifest)


def _upcycling_problems(config: Config, dense: Mapping[str, Any]) -> Iterator[Problem]:
    """Layers of experts that would not compute at first what the dense ones did. dense: the checkpoint's model."""
    wanted = config.init_from
    assert wanted is not None
    if not wanted.upcycle:
        for key in ("upcycle_noise", "upcycle_drop"):
            if value := getattr(wanted, key):
                yield Problem(
                    f"init_from.{key}", value, "changes copies that there are not; set init_from.upcycle: true"
                )
        return
    experts = {name: block.mlp for name, block in config.model.blocks.items() if isinstance(block.mlp, ExpertsSection)}
    if not experts:
        yield Problem("init_from.upcycle", True, "needs a model with experts, and no block has an mlp of type experts")
    for name, mlp in experts.items():
        path, router = f"model.blocks.{name}.mlp", mlp.router
        if not router.renormalize and router.type != "top_k_softmax":
            text = "weights whose sum is 1 make copies compute what one did; set true for init_from.upcycle"
            yield Problem(f"{path}.router.renormalize", False, text)
        for key, value, plain in (
            ("router.scale", router.scale, 1),
            ("router.skip", router.skip, False),
            ("latent", mlp.latent, None),
        ):
            if value != plain:
                yield Problem(f"{path}.{key}", value, f"must be {json.dumps(plain)} for init_from.upcycle")
    layers, found = parse_pattern(dense["layers"]), dict[str, Problem]()
    for layer, before in zip(config.model.layer_list(), layers if wanted.strict else [], strict=False):
        of_before = dense["blocks"][before.block].get("mlp") or {}
        if layer.block in experts and of_before.get("type", "experts") != "experts":
            for problem in _unlike(f"model.blocks.{layer.block}.mlp", experts[layer.block], of_before):
                found.setdefault(problem.path, problem)
    yield from found.values()


def _unlike(path: str, mlp: ExpertsSection, dense: Mapping[str, Any]) -> Iterator[Problem]:
    """Settings of a layer's experts with which they are no copies of the checkpoint's MLP. path: of `mlp`."""
    for key, of_dense in (("activation", "type"), ("d_ff", "d_ff"), ("bias", "bias")):
        if (found := getattr(mlp, key)) != dense[of_dense]:
            wanted = json.dumps(dense[of_dense]).strip('"')
            yield Problem(f"{path}.{key}", found, f"must be {wanted}, as mlp.{of_dense} of the checkpoint of init_from")
    for key in ("activation_multiplier", "out_multiplier"):
        if dense.get(key, 1) != 1:
            text = f"cannot make experts of the checkpoint's MLPs, whose {key} is {dense[key]}; set false"
            yield Problem("init_from.upcycle", True, text)


def _unmatched(wanted: InitialWeights, checkpoint: Checkpoint) -> list[tuple[int, str]]:
    """Patterns, with their numbers, that match nothing in the checkpoint, and so take nothing: all of them where one has to
    match (`strict`), or where none does. Which of them match a parameter of the model shows when they are loaded."""
    if wanted.parameters == ["*"]:
        return []
    names = [name.removeprefix("model.") for name in checkpoint.read_index().tensors if name.startswith("model.")]
    found = [
        (number, pattern)
        for number, pattern in enumerate(wanted.parameters)
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    return found if wanted.strict or len(found) == len(wanted.parameters) else []


def _mismatches(config: Config, manifest: Manifest) -> Iterator[Problem]:
    """Every setting in which the checkpoint's model differs. Where only a part is taken, tensors are compared as they are
    loaded (checkpoint/partial_load.py)."""
    assert config.init_from is not None
    if not config.init_from.is_whole:
        return
    for change in changes(manifest.config["model"], config.model, "model."):
        if _MAY_DIFFER.fullmatch(change.path):
            continue
        if change.path == "model.max_seq_len" and config.model.positions == "none":
            continue  # no parameter has this length
        found = None if change.new is ABSENT else change.new
        wanted = "is not in" if change.old is ABSENT else f"must be {text(change.old)}, as in"
        yield Problem(change.path, found, f"{wanted} the checkpoint of init_from ({config.init_from.path})")
    if (adapt := manifest.config.get("adapt")) and adapt != (config.adapt and config.adapt.model_dump(mode="json")):
        message = f"must be {text(adapt)}, as in the checkpoint of init_from ({config.init_from.path}), or its changes are lost"
        yield Problem("adapt", None, message)
