"""Addresses of checkpoint stores: `s3://bucket/prefix`, `file:///folder`, or a path; and paths that are none. No torch here."""

import re


def is_remote(address: str) -> bool:
    """True for an address with a scheme, as `s3://bucket/prefix` and `file:///path` do; anything else is a path here."""
    return "://" in address


def address_problem(address: str) -> str | None:
    """Fault of a store's address, as a sentence fragment; None for a good one."""
    scheme, separator, rest = address.partition("://")
    if not separator and re.match(r"(s3|gs|file):", address):
        return "must have two slashes behind the colon: s3://bucket/prefix"
    if separator and scheme not in ("s3", "file"):
        return "must be s3://bucket/prefix, file:///folder or a folder"
    if scheme == "s3" and separator and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*/[^/].*", rest):
        return "must name a bucket and a prefix: s3://bucket/prefix"
    if scheme == "file" and separator and not rest.startswith("/"):
        return "must be absolute: file:///folder"
    return None if rest or not separator else "names no place"


def local_folder(address: str) -> str | None:
    """The folder of a `file://` address or a path; None for a store elsewhere."""
    if address.startswith("file://"):
        return address.removeprefix("file://")
    return None if is_remote(address) else address


def local_problem(path: str) -> str | None:
    """Fault of the name of a file or folder to write, as a sentence fragment; None for a good one.

    Any scheme is refused, also with one slash: `s3:/bucket` is what pathlib leaves of an address.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/|(s3|gs|file):", path):
        return (
            "expected a path on this machine, without a scheme (what sends a run's checkpoints to a store is "
            "checkpoint.remote)"
        )
    return None


def may_be_hub_name(text: str) -> bool:
    """True for a tokenizer's name that is no local path by its form."""
    return not (text.startswith((".", "/", "~")) or text.endswith(".json") or text.count("/") > 1)
