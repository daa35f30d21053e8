"""The data that a command is about: a prepared folder, shards at any place, a run's YAML, or a run. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.config.addresses import is_remote
from llmtrain.errors import UserError

if TYPE_CHECKING:
    from llmtrain.data.shards.stored_stream import StoredStream
    from llmtrain.schema.data import DataConfig, StreamConfig

SPLITS = ("train", "validation")
TARGET = (
    "a folder that `llmtrain prepare` wrote, of one stream or of several, or of other MDS shards (also s3://); a run's YAML; or a "
    "run's folder"
)


@dataclass(frozen=True)
class RunData:
    """The data of a run. step: that of its newest checkpoint; None for a YAML. passed_over: as SeenData takes it."""

    data: DataConfig
    global_batch_size: int
    step: int | None
    fingerprint: str | None
    passed_over: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Target:
    """streams: by split. run: None for a folder of shards. folders: what `prepare` wrote, on this machine."""

    streams: dict[str, list[StoredStream]]
    run: RunData | None = None
    folders: tuple[Path, ...] = ()


def open_target(place: str, overrides: Sequence[str] = (), damaged: dict[str, str] | None = None) -> Target:
    """The data at a place. overrides: of a YAML. damaged: gets what is wrong with the index of a stream, by its place, and the
    stream is left out; without it that is raised. Raises UserError, with what is there instead."""
    opening = _Opening(damaged)
    if not _is_run(place):
        _refuse_overrides(place, overrides)
        if whole := opening.place(place):
            return Target({"train": [whole]})
        found = {split: opening.place(f"{place.rstrip('/')}/{split}", split) for split in SPLITS}
        streams = {split: [stream] for split, stream in found.items() if stream}
        if streams or damaged:
            return Target(streams, folders=() if is_remote(place) else (Path(place).expanduser(),))
        return _several(place, opening)
    run = open_run(place, overrides)
    streams = {}
    for split, named in (("train", run.data.train_streams()), ("validation", run.data.validation_streams())):
        if named:
            streams[split] = [stream for pair in named.items() if (stream := opening.stream(*pair))]
    return Target(streams, run)


class _Opening:
    """Opening streams; damaged: see open_target."""

    def __init__(self, damaged: dict[str, str] | None) -> None:
        self._damaged = damaged

    def place(self, place: str, name: str | None = None) -> StoredStream | None:
        from llmtrain.data.shards.stored_stream import open_place

        known_as = place if is_remote(place) else str(Path(place).expanduser())
        return self._try(known_as, lambda: open_place(place, name))

    def stream(self, name: str, config: StreamConfig) -> StoredStream | None:
        from llmtrain.data.shards.stored_stream import open_stream

        return self._try(f"{config.local}/{config.split or ''}", lambda: open_stream(name, config))

    @property
    def found_damage(self) -> bool:
        return bool(self._damaged)

    def _try(self, place: str, opening: Callable[[], StoredStream | None]) -> StoredStream | None:
        from llmtrain.data.shards.index import ShardError

        try:
            return opening()
        except ShardError as error:
            if self._damaged is None:
                raise
            self._damaged[place] = str(error)
            return None


def _several(place: str, opening: _Opening) -> Target:
    """The folders of several streams in one. Raises UserError where there are none."""
    from llmtrain.data.partitions.prepared_folder import MANIFEST

    root = Path(place).expanduser()
    folders = [] if is_remote(place) else sorted(file.parent for file in root.glob(f"*/{MANIFEST}"))
    streams: dict[str, list[StoredStream]] = {}
    for folder in folders:
        for split in SPLITS:
            if found := opening.place(str(folder / split), folder.name):
                streams.setdefault(split, []).append(found)
    if not (streams or opening.found_damage):
        raise UserError(f"{place}: expected {TARGET}; it holds no index.json of shards, and no checkpoints/")
    return Target(streams, folders=tuple(folders))


def open_run(place: str, overrides: Sequence[str] = ()) -> RunData:
    """The data of a run's folder, of a checkpoint, or of a YAML. Raises UserError."""
    if _is_checkpoint(place):
        _refuse_overrides(place, overrides)
        return _recorded(place)
    from llmtrain.checkpoint.repository import Repository, silent
    from llmtrain.schema.load import load_config

    config = load_config(place, overrides)
    data = config.data
    if found := Repository(Path(config.run_dir) / "checkpoints").newest(silent):  # the run would go on in its order
        data = data.in_order_of(found.require().data.get("position", {}))
    return RunData(data, config.samples_per_step, None, None)


def _refuse_overrides(place: str, overrides: Sequence[str]) -> None:
    if overrides:
        raise UserError(f"{overrides[0]}: settings are replaced in a YAML alone, and {place} is none")


def _is_run(place: str) -> bool:
    """True for a run or a YAML; False for a folder of shards."""
    path = Path(place).expanduser()
    return _is_checkpoint(place) or not (is_remote(place) or path.is_dir())


def _is_checkpoint(place: str) -> bool:
    path = Path(place).expanduser()
    return not is_remote(place) and (
        (path / "checkpoints").is_dir() or (path.name.startswith("step-") and path.is_dir())
    )


def _recorded(place: str) -> RunData:
    from llmtrain.checkpoint.repository import Repository
    from llmtrain.config.decode import decode
    from llmtrain.schema.data import DataConfig

    checkpoint = Repository(place).find()
    manifest = checkpoint.require()
    position = manifest.data.get("position")
    if "train" not in manifest.config or position is None:
        raise UserError(f"{checkpoint.address} holds weights alone: it is of no run, and has read no data")
    data, problems = decode(DataConfig, manifest.config["data"])
    if problems or data is None:
        unknown = "; ".join(f"data.{problem.path}: {problem.message}" for problem in problems)
        raise UserError(f"{checkpoint.address} was written by another version of llmtrain ({unknown})")
    began = position.get("order", "streaming")
    if began == "seekable" and data.order_name == "mixed":
        raise UserError(
            f"{checkpoint.address} was written by another version of llmtrain, which ordered mixtures otherwise"
        )
    data = data.model_copy(update={"order": "streaming" if began == "streaming" else "seekable"})
    objective = manifest.config.get("objective") or {}  # of a policy: sequences of a step that are made of one sample
    per_sample = objective.get("group_size", 1) * objective.get("epochs", 1)
    batch = manifest.config["train"]["global_batch_size"] // per_sample
    passed_over = manifest.data.get("passed_over", [])
    return RunData(data, batch, manifest.step, manifest.data.get("fingerprint"), passed_over)
