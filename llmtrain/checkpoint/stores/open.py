"""The store of an address: an S3-compatible object store, or a mounted folder. No torch here."""

from pathlib import Path

from llmtrain.checkpoint.stores.base import ObjectStore, StoreError
from llmtrain.checkpoint.stores.mounted import MountedStore
from llmtrain.config.addresses import address_problem


def open_store(address: str) -> ObjectStore:
    """The store at `s3://bucket/prefix`, `file:///folder` or a plain path. Sends no request yet."""
    if problem := address_problem(address):
        raise StoreError(f"{address} {problem}")
    scheme, separator, rest = address.partition("://")
    if separator and scheme == "s3":
        from llmtrain.checkpoint.stores.s3 import S3Store  # boto3 is large

        name, _, prefix = rest.partition("/")
        return S3Store(name, prefix.rstrip("/"))
    return MountedStore(Path(rest if separator else address).expanduser())
