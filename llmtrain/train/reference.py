"""Log-probabilities of a run's answers by its reference model, the weights that it starts from: computed before its first step.

They are kept in RUN/reference, a file for each of training and validation that names the weights and the shards it is of, and the
loader gives them with the samples. A run that is resumed reads the file; without it, it computes them again, from the weights that
it began with.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.checkpoint.initial_weights import initial_checkpoint
from llmtrain.config.output_folder import replace_file
from llmtrain.config.regular_file import require_regular
from llmtrain.data.loader.loaders import TrainLoader, ValidationLoader
from llmtrain.data.loader.token_samples import TokenSamples
from llmtrain.distributed.world import World
from llmtrain.logs import run_log
from llmtrain.objectives.base import Batch, Outputs, without_gradient
from llmtrain.objectives.preference import REFERENCE, Preference
from llmtrain.train.batches import own_part
from llmtrain.train.build import Training
from llmtrain.train.composer_model import evaluating
from llmtrain.train.step import to_device

_NAME = "log_p"


def add_reference(
    training: Training,
    loaders: dict[str, TrainLoader | ValidationLoader | None],
    world: World,
    begin: Callable[[], object],
) -> None:
    """Give the loaders' samples the column REFERENCE, where the objective needs it. begin: sets the weights that the run starts
    from; called only where a file is missing. Every rank calls this."""
    objective = training.objective
    if not isinstance(objective, Preference) or not objective.section.needs_reference:
        return
    missing = {}
    for name, loader in loaders.items():
        if loader is None:
            continue
        samples = loader.dataset if isinstance(loader, TrainLoader) else loader.dataset.data
        path = Path(training.config.run_dir) / "reference" / f"{name}.safetensors"
        key = reference_key(training, samples)
        stored = [read_reference(path, key, samples.num_samples) if world.is_main else None]
        dist.broadcast_object_list(stored, src=0)
        if stored[0] is None:
            missing[name] = (loader, samples, path, key)
        else:
            samples.beside[REFERENCE] = stored[0]
    if missing:
        begin()
    for name, (loader, samples, path, key) in missing.items():
        values = compute_reference(training, loader, samples, world)
        samples.beside[REFERENCE] = values
        if world.is_main:
            write_reference(path, key, values)
            run_log.info(f"reference log-probabilities of {len(values):,} samples of {name} data: {path}")


def reference_key(training: Training, samples: TokenSamples) -> str:
    """Digest of the weights that a run starts from, how it computes with them, and the samples."""
    config = training.config
    start: object = config.seed
    if config.init_from is not None:
        start = [
            initial_checkpoint(config).require().save_id,
            config.init_from.model_dump(mode="json", exclude={"path"}),
        ]
    shards = [stream.index.shards.digest for stream in samples.streams]
    model, adapt = (one and one.model_dump(mode="json") for one in (config.model, config.adapt))
    parts = [start, model, adapt, config.train.dtype, config.train.precision, config.data.seq_len, shards]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True))


def read_reference(path: Path, key: str, samples: int) -> NDArray[np.float32] | None:
    """The values of a file, [samples, answers]; None where there is none, or of other weights or samples. Raises CheckpointError
    for a file that is damaged."""
    if not os.path.lexists(path):
        return None
    try:
        require_regular(path)
        with safe_open(path, framework="np") as file:
            about, values = file.metadata() or {}, file.get_tensor(_NAME)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; remove it, and it is made again") from None
    if about.get("key") != key or len(values) != samples:
        return None
    if values.dtype != np.float32 or about.get("xxh3") != xxhash.xxh3_64_hexdigest(values.tobytes()):
        raise CheckpointError(f"{path} is damaged: its content is not what it was; remove it, and it is made again")
    return values


def write_reference(path: Path, key: str, values: NDArray[np.float32]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"key": key, "xxh3": xxhash.xxh3_64_hexdigest(values.tobytes())}
    replace_file(path, save({_NAME: values}, about))


def compute_reference(
    training: Training, loader: TrainLoader | ValidationLoader, samples: TokenSamples, world: World
) -> NDArray[np.float32]:
    """Log-probabilities of all answers by the weights as they are, without dropout: [samples, answers], NaN where a sample has no
    such answer. Every rank calls this."""
    model, own = training.model, {}
    compute = _of(training)
    for ids, batch in _batches(loader, samples, training.config.train.least_microbatch, world):
        part = own_part(batch, training.segments, model.hybrid.ranks) if world.replication > 1 else dict(batch)
        with evaluating(model):
            found = without_gradient(model, to_device(part, model.device), compute)
        rows, documents, values = (one.cpu().numpy() for one in found)
        for number, sample in enumerate(ids):
            own[sample] = (documents[rows == number], values[rows == number])
    everyone: list[dict[int, tuple[NDArray, NDArray]]] = [{}] * world.size
    dist.all_gather_object(everyone, own if world.is_first_reader else {})
    of_samples = {sample: one for some in everyone for sample, one in some.items()}
    width = max((int(documents.max()) + 1 for documents, _ in of_samples.values() if len(documents)), default=2)
    result = np.full((samples.num_samples, width), np.nan, np.float32)
    for sample, (documents, values) in of_samples.items():
        result[sample, documents] = values
    return result


def _of(training: Training) -> Callable[[Outputs, Batch], tuple[Tensor, Tensor, Tensor]]:
    objective = training.objective
    assert isinstance(objective, Preference)

    def compute(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        found = objective.likelihoods(outputs, batch)
        return found.row.flatten(), found.document.flatten(), found.log_p.flatten().float()

    return compute


def _batches(
    loader: TrainLoader | ValidationLoader, samples: TokenSamples, size: int, world: World
) -> Iterator[tuple[list[int], Any]]:
    """(sample ids, batch) of this rank's part of all samples, of one number on every rank: some read the last sample again."""
    step = size * world.data_size
    for begin in range(0, samples.num_samples, step):
        first = begin + world.data_rank * size
        ids = [min(one, samples.num_samples - 1) for one in range(first, first + size)]
        yield ids, loader.collate_fn([samples.get_item(one) for one in ids])
