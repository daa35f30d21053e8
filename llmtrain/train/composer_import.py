"""The import of Composer and StreamingDataset, without what they take along and no run of ours uses: two thirds of its time."""

import importlib
import pkgutil
import platform
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from types import ModuleType
from typing import Any

_OPTIONAL = ("peft", "matplotlib", "scipy", "chardet", "paramiko")
"""Packages that Composer, and torchmetrics and requests below it, do without where they are not installed: for HuggingFaceModel,
plots of metrics, metrics of sounds, a second guess of an encoding, SFTP."""
_METRICS = (
    *("audio", "classification", "clustering", "detection", "image", "multimodal", "nominal"),
    *("regression", "retrieval", "segmentation", "shape", "text", "video"),
)
_DEFERRED = (
    *("cpuinfo", "mcli", "torchvision", "transformers", "streaming.multimodal", "streaming.text", "streaming.vision"),
    *(f"torchmetrics.{part}{kind}" for part in ("", "functional.") for kind in _METRICS),
)
"""Modules that they import at their head for what no run of ours does: the processor's features, loggers of Mosaic's platform,
transforms of images, metrics of texts, data sets of images and videos."""


def import_composer() -> None:
    """Import Composer and StreamingDataset. Of _OPTIONAL they have nothing then; a module of _DEFERRED is imported at its first
    use. Other imports of these modules, before and afterwards, are as ever."""
    with Reduced(_OPTIONAL, _DEFERRED):
        importlib.import_module("composer")
        importlib.import_module("streaming")
    # Composer's Trainer asks for the processor's name, for a process of a second, and logs the versions beside it alone.
    record: Any = importlib.import_module("composer.utils.collect_env")
    record.get_cpu_model = platform.machine


class Reduced(DistributionFinder):
    """Context in which modules that are not imported yet cannot be (optional), or give stand-ins (deferred).

    An optional one is, in the context, as a package that is not installed: it has neither modules nor a version.
    """

    def __init__(self, optional: tuple[str, ...], deferred: tuple[str, ...] = ()):
        self.optional = [name for name in optional if name not in sys.modules]
        self.deferred = [name for name in deferred if name not in sys.modules]

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _Deferred):
                del sys.modules[name]

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name in self.optional:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        deferred = any(f"{name}.".startswith(f"{module}.") for module in self.deferred)
        return ModuleSpec(name, self, is_package=True) if deferred else None  # type: ignore[arg-type]

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is not None and context.name in self.optional:
            raise PackageNotFoundError(context.name)
        return iter(())

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the package itself is imported later, if at all."""


class _Deferred(ModuleType):
    """Stand-in for a module, or for a member of one. Its members are stand-ins in the context, and the real ones later."""

    def __init__(self, name: str, context: Reduced):
        super().__init__(name)
        self.__dict__["_context"] = context

    def __getattr__(self, member: str) -> Any:
        if member.startswith("__"):  # the machinery of imports asks
            raise AttributeError(member)
        if self._context in sys.meta_path:
            return _Deferred(f"{self.__name__}.{member}", self._context)
        return getattr(pkgutil.resolve_name(self.__name__), member)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return pkgutil.resolve_name(self.__name__)(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, pkgutil.resolve_name(self.__name__))
