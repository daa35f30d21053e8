"""Versions of installed libraries."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as metadata_version


def version(name: str) -> str:
    """The authors' version of a distribution, whether it is installed as such or repacked (scripts/build_wheels.py).

    Raises PackageNotFoundError.
    """
    try:
        return metadata_version(name)
    except PackageNotFoundError as error:
        try:
            return metadata_version(f"llmtrain-{name}").partition(".post")[0]
        except PackageNotFoundError:
            raise error from None


def versions(*names: str) -> dict[str, str]:
    """Versions by name, without the part after `+`, which is the vendor that torch was built for."""
    return {name: version(name).partition("+")[0] for name in names}
