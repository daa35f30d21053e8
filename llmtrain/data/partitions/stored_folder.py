"""A prepared folder in a store: partitions are made on this machine and brought there, by any number of machines.

Objects appear whole. The report of a partition is brought behind its other files, and the manifest behind everything, so that what
is listed is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.locks import required_folder
from llmtrain.config.output_folder import MARKER, replace_file
from llmtrain.config.regular_file import parse_json
from llmtrain.data.partitions.prepared_folder import MANIFEST, REPORTS
from llmtrain.data.partitions.provenance import documents_path
from llmtrain.data.partitions.report import PartitionReport, arrays_path, report_path
from llmtrain.data.sources.files import PrepareError
from llmtrain.data.sources.storage import list_remote, open_file, remove_remote, write_remote
from llmtrain.schema.data import PrepareConfig

_THREADS = 16


@dataclass(frozen=True)
class StoredFolder:
    """A folder in a store. address: s3://BUCKET/FOLDER; here: the folder on this machine in which its files are made."""

    address: str
    here: Path

    @classmethod
    def of(cls, address: str, here: Path, config: PrepareConfig) -> StoredFolder:
        """Raises PrepareError for an address that cannot be written to, and for what a folder in a store cannot have."""
        scheme, _, place = address.rstrip("/").partition("://")
        if scheme != "s3" or not all(place.partition("/")[::2]):
            raise PrepareError(f"--out {address}: expected a folder on this machine, or s3://BUCKET/FOLDER")
        if config.vocab_size is not None:
            reason = "train the tokenizer into a folder on this machine first, and name it with --tokenizer"
            raise PrepareError(f"--out {address}: {reason}")
        if config.dedup:
            reason = "--dedup compares the documents in a folder that all parts share; give one on this machine"
            raise PrepareError(f"--out {address}: {reason}")
        if inside := [one for one in config.sources if address.startswith(f"{one.rstrip('/')}/")]:
            raise PrepareError(f"{address} lies inside a source ({inside[0]}); name another --out")
        return cls(address.rstrip("/"), here)

    def sizes(self) -> dict[str, int]:
        """Names and sizes of all objects; none for a place that holds nothing yet. Raises PrepareError for a store that refuses."""
        try:
            found = list(list_remote(self.address))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise PrepareError(f"cannot list {self.address}: {error}") from error
        return {one.address.removeprefix(f"{self.address}/"): one.size for one in found}

    def manifest(self) -> dict[str, Any] | None:
        """The manifest, of a folder that is complete."""
        return parse_json(self._read(MANIFEST)) if MANIFEST in self.sizes() else None

    def report(self, id: str, sizes: dict[str, int]) -> PartitionReport | None:
        """The report of a partition that is there with all its files; else None. sizes: what `sizes` returns."""
        if not all(name in sizes for name in self._beside(id)) or self._name(report_path(self.here, id)) not in sizes:
            return None
        report = PartitionReport(**parse_json(self._read(self._name(report_path(self.here, id)))))
        parts = report.shard_files().items()
        return report if all(sizes.get(name) == part["bytes"] for name, part in parts) else None

    def bring(self, report: PartitionReport) -> None:
        """Bring a partition that was made here to the store, and remove its shards here."""
        shards = report.shard_files()
        self.write([*shards, *self._beside(report.id), self._name(report_path(self.here, report.id))])
        for name in shards:
            (self.here / name).unlink()

    def fetch(self, reports: Iterable[PartitionReport]) -> None:
        """Fetch what merging needs beside the reports."""
        names = [name for report in reports for name in self._beside(report.id) if not (self.here / name).exists()]
        with ThreadPoolExecutor(_THREADS) as pool:
            for name, content in zip(names, pool.map(self._read, names), strict=True):
                replace_file(self.here / name, content)

    def publish(self, reports: Iterable[PartitionReport]) -> None:
        """Bring what was merged here to the store, remove there what is of no partition, and bring the manifest."""
        made = [
            str(path.relative_to(self.here))
            for path in sorted(self.here.rglob("*"))
            if path.is_file() and path.name != MARKER
        ]
        self.write(name for name in made if name != MANIFEST)
        kept = {MANIFEST, *made}
        for report in reports:
            kept |= {*self._beside(report.id), self._name(report_path(self.here, report.id)), *report.shard_files()}
        for name in self.sizes().keys() - kept:
            remove_remote(f"{self.address}/{name}")
        self.write([MANIFEST])

    def write(self, names: Iterable[str]) -> None:
        """Write files of this machine, one after the other."""
        for name in names:
            write_remote(f"{self.address}/{name}", (self.here / name).read_bytes())

    def _read(self, name: str) -> bytes:
        with open_file(f"{self.address}/{name}") as file:
            return file.read()

    def _beside(self, id: str) -> list[str]:
        return [self._name(path) for path in (arrays_path(self.here, id), documents_path(self.here / REPORTS, id))]

    def _name(self, path: Path) -> str:
        return path.relative_to(self.here).as_posix()


def scratch_folder(address: str) -> Path:
    """The folder on this machine in which the files of one in a store are made: the same for every process of the user."""
    digest = hashlib.blake2b(address.encode(), digest_size=8).hexdigest()
    return required_folder("prepare", "files") / digest
