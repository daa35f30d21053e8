"""Checkpoints of plain files, and an S3 server on this machine to bring them to."""

import random
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import boto3
from moto.server import ThreadedMotoServer

from llmtrain.checkpoint import local
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import Manifest
from llmtrain.checkpoint.stores.s3 import RetryPolicy, S3Store

BUCKET = "checkpoints"
QUICK = RetryPolicy(attempts=12, first=0.002, longest=0.02)
"""A request in three fails: twelve in a row, once in 500,000."""


def make_checkpoint(
    root: Path, step: int, files: int = 5, nbytes: int = 20_000, more: Sequence[str] = (), **changes: object
) -> Path:
    """A complete checkpoint of random files; every save has other bytes."""
    folder = root / local.folder_name(step)
    folder.mkdir(parents=True)
    for i in range(files):
        (folder / f"__0_{i}.distcp").write_bytes(random.randbytes(nbytes + i))
    for name in more:
        (folder / name).write_text(name)
    records: dict[str, manifests.FileRecord] = {
        path.name: {"bytes": path.stat().st_size, "xxh3_128": manifests.hash_file(path)} for path in folder.iterdir()
    }
    about = {"config": {}, "clock": {}, "data": {}, "versions": {}} | changes
    written = Manifest(save_id=str(uuid.uuid4()), step=step, tokens=100 * step, files=records, **about)  # type: ignore[arg-type]
    manifests.write(folder, written)
    return folder


def same_files(a: Path, b: Path) -> bool:
    return {path.name: path.read_bytes() for path in a.iterdir()} == {
        path.name: path.read_bytes() for path in b.iterdir()
    }


def flip(path: Path) -> None:
    """One bit, in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


class S3:
    """A server with one bucket. port: where it listens. client: straight to it, for looking behind the scenes."""

    def __init__(self, port: int):
        self.port = port
        self.client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1")

    def bucket(self, prefix: str, url: str | None = None, part_bytes: int = 2**20) -> S3Store:
        """Through `url` (a proxy's), or straight."""
        with patch.dict("os.environ", S3_ENDPOINT_URL=url or f"http://127.0.0.1:{self.port}"):
            return S3Store(BUCKET, prefix, QUICK, part_bytes)

    def names(self, prefix: str) -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix + "/").get("Contents", [])
        return [item["Key"].removeprefix(prefix + "/") for item in found]

    def flip(self, key: str) -> None:
        """One bit of an object, its metadata as they were."""
        found = self.client.get_object(Bucket=BUCKET, Key=key)
        content = bytearray(found["Body"].read())
        content[len(content) // 2] ^= 4
        self.client.put_object(Bucket=BUCKET, Key=key, Body=bytes(content), Metadata=found["Metadata"])


@contextmanager
def serving() -> Iterator[S3]:
    """The server, and credentials for it in the environment."""
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with (
        patch.dict("os.environ", keys),
        patch("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1000),  # parts of 5 MiB would make slow tests
    ):
        server.start()
        try:
            made = S3(server._server.server_port)  # type: ignore[union-attr]
            made.client.create_bucket(Bucket=BUCKET)
            with patch.dict("os.environ", S3_ENDPOINT_URL=f"http://127.0.0.1:{made.port}"):
                yield made
        finally:
            server.stop()
