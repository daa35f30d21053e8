"""`llmtrain prepare`: sources -> tokenizer -> partitions -> MDS shards.

The result depends on the sources and the settings, not on the number of processes or machines: the sources are cut into
partitions, each of which one process reads, tokenises, packs and writes. A partition that is finished stays finished: the same
command goes on after a kill, and `overwrite` makes anew only what has changed.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtrain.config.output_folder import OutputError, publish_folder
from llmtrain.data.partitions.folder_maker import FolderMaker, Part, PartState
from llmtrain.data.partitions.prepared_folder import PreparedFolder, lock_folder
from llmtrain.data.sources.files import PrepareError
from llmtrain.schema.data import PrepareConfig

__all__ = ["Part", "PartState", "PrepareError", "PreparedFolder", "prepare", "prepare_part"]


def prepare(
    config: PrepareConfig,
    progress: bool = True,
    overwrite: bool = False,
    merge_only: bool = False,
    address: str | None = None,
) -> PreparedFolder:
    """Write train/, validation/, tokenizer/ and manifest.json into `config.out`, unless the same are there already.

    merge_only: make no partition, but merge those that `prepare_part` has made. address: a folder in a store, which gets all in
    place of `config.out`; that one is then where files are made, and is removed.
    Raises PrepareError (missing sources, bad records, a folder made with other settings, partitions that are missing),
    OutputError (no disk space) and TokenizerError.
    """
    out = _place(config)
    maker = FolderMaker(config, out, address)
    with lock_folder(out):
        inputs = maker.describe()
        manifest = maker.find_reusable(inputs, overwrite)
        if manifest is not None:
            return PreparedFolder(out, manifest, reused=True, address=address)
        with _write_errors(address or out):
            manifest = maker.run(inputs, progress, merge_only)
            if maker.store:
                shutil.rmtree(maker.folder)
            else:
                publish_folder(maker.folder, out, replace=True)
    return PreparedFolder(out, manifest, reused=False, address=address)


def prepare_part(
    config: PrepareConfig, part: Part, progress: bool = True, overwrite: bool = False, address: str | None = None
) -> PartState:
    """Make a share of the partitions of `config.out`, for `prepare` to merge. The parts may be made at the same time, by
    machines that share the folder. address: as in `prepare`; what the machines share is then the store.

    Raises what `prepare` raises, and PrepareError with max_bytes, which needs all in order.
    """
    if config.max_bytes is not None:
        raise PrepareError("max_bytes takes the partitions one after the other, so it cannot be made in parts")
    out = _place(config)
    maker = FolderMaker(config, out, address)
    with lock_folder(out.with_name(f"{out.name}.part-{part.index}-of-{part.count}")), _write_errors(address or out):
        inputs = maker.describe()
        if maker.find_reusable(inputs, overwrite) is not None:
            return PartState.MERGED
        return maker.run_part(inputs, progress, part)


def _place(config: PrepareConfig) -> Path:
    """The folder to write: of a link, what it leads to, so that the link stays."""
    out = Path(config.out).expanduser().absolute()
    return out.resolve() if out.is_symlink() else out


@contextmanager
def _write_errors(out: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error}") from error
