"""The import of Composer, without a package that it would take along and that no run of ours uses."""

import contextlib
import importlib
import sys
from collections.abc import Iterator


def import_composer() -> None:
    """Import Composer. Its HuggingFaceModel is then without peft, which brings accelerate and half of transformers."""
    with unavailable("peft"):
        importlib.import_module("composer")


@contextlib.contextmanager
def unavailable(*names: str) -> Iterator[None]:
    """Context in which packages that are not imported yet cannot be; afterwards they can, as before."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None, by Python's reference: ModuleNotFoundError
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
