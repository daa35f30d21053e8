"""torch._dynamo, PyTorch's compiler, on a start that compiles nothing: FSDP2 and the optimizers import it, for a second, to ask
whether they are compiled."""

import functools
import importlib
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_NAME = "torch._dynamo"


def defer_dynamo() -> None:
    """Have torch._dynamo imported at the first use of more of it than a run takes whose layers are not compiled."""
    if _NAME not in sys.modules:
        AbsentDynamo().begin()


class AbsentDynamo(ModuleType):
    """Stand-in for torch._dynamo: its answers while nothing is compiled. Where anything else of it is asked for, or a module in it
    is imported, the real one takes its place; what was disabled until then is disabled for the real one."""

    class OptimizedModule:
        """No module is one."""

    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
        flags = ("compiled_autograd_enabled", "compiled_autograd_enabled_force_eager", "in_compiled_autograd_region")
        self.compiled_autograd = ModuleType(f"{_NAME}.compiled_autograd")
        self.compiled_autograd.__dict__.update(dict.fromkeys(flags, False), __getattr__=self._member_of_autograd)

        self._modules = _Modules(self.real)

    def begin(self) -> None:
        sys.modules.update({_NAME: self, self.compiled_autograd.__name__: self.compiled_autograd})
        torch._dynamo = self
        sys.meta_path.insert(0, self._modules)

    def real(self) -> Any:
        """torch._dynamo, imported."""
        if sys.modules.get(_NAME) is self:
            sys.meta_path.remove(self._modules)
            del sys.modules[_NAME], sys.modules[self.compiled_autograd.__name__], torch._dynamo
        return importlib.import_module(_NAME)

    def is_compiling(self) -> bool:
        return False

    def graph_break(self, msg: str = "") -> None:
        """Nothing."""

    def disable(self, fn: Callable | None = None, recursive: bool = True, **options: Any) -> Callable:
        if fn is None:
            return functools.partial(self.disable, recursive=recursive, **options)
        if isinstance(fn, (type, torch.nn.Module)):
            return self.real().disable(fn, recursive, **options)

        @functools.cache
        def disabled() -> Callable:
            return self.real().disable(fn, recursive, **options)

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (fn if sys.modules.get(_NAME) is self else disabled())(*args, **kwargs)

        return call

    def __getattr__(self, member: str) -> Any:
        if member.startswith("__"):  # the machinery of imports asks
            raise AttributeError(member)
        return importlib.import_module(f"{_NAME}.config") if member == "config" else getattr(self.real(), member)

    def _member_of_autograd(self, member: str) -> Any:
        if member.startswith("__"):
            raise AttributeError(member)
        return getattr(self.real().compiled_autograd, member)


class _Modules(MetaPathFinder):
    """Finder of modules in torch._dynamo, which are the real one's; but its settings are imported alone."""

    def __init__(self, real: Callable[[], Any]):
        self.real = real

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith(f"{_NAME}.") and name != f"{_NAME}.config" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.real()
        module = importlib.import_module(spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        """Nothing but the module's own spec again: `create_module` has imported it."""
        module.__spec__ = module.__spec__.loader_state
