"""Tests of kernels in processes of their own: in Triton's interpreter, faster than it comes; and compiled for other machines."""

import builtins
import functools
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.processes import output_of

ROOT = Path(__file__).parents[2]
FURTHER = "LLMTRAIN_TESTS_FURTHER"
"""Variable with the options by which a session chooses further tests."""


def run_interpreted(*operations: str, cases: str = "", timeout: float = 900) -> None:
    """Runs tests/numerics/interpreted_OPERATION.py, in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
    Several operations in one, which imports for many seconds.

    cases: as for pytest's -m; by default what this session takes, with --ci those marked so too. timeout: in seconds. Raises
    AssertionError with what was printed if a case fails or is skipped.
    """
    files = [str(ROOT / "tests" / "numerics" / f"interpreted_{operation}.py") for operation in operations]
    plugins = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "ignore::DeprecationWarning",
    ]  # thousands, of the interpreter
    chosen = ["-m", cases] if cases else os.environ.get(FURTHER, "").split()
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *plugins, *chosen, *files]
    printed = output_of(*command, cwd=ROOT, seconds=timeout, TRITON_INTERPRET="1", PYTEST_ADDOPTS="")
    assert "skipped" not in printed, printed


def compiled(program: str, *words: str) -> Any:
    """What a program that compiles kernels prints in its last line, as JSON, in a process in which Triton does not interpret."""
    return json.loads(
        output_of(sys.executable, "-c", program, *words, cwd=ROOT, CUDA_VISIBLE_DEVICES="").splitlines()[-1]
    )


@functools.cache
def speed_up() -> None:
    """To be called in a process that interprets kernels (TRITON_INTERPRET=1), before the first of them.

    - Every call of a device function replaces the whole of `triton.language` anew. The launch has done that already.
    - Every integer sum is computed a second time in 64 bits, to see whether it overflows: not at the sizes of a test.
    - Types and shapes, of which a kernel has a few dozen, are made anew for every value: they are kept, as constants are.
    - Every call passes two functions that only see to its `_semantic`, and every value is asked whether it has its type's size.
    - Operands of one type and shape pass through all rules of promotion, which leave them as they are.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _replace_languages_once(interpreter)
    _keep_shapes(core)
    _keep_numpy_types(core, interpreter)
    _call_at_once(core, interpreter)
    _promote_only_unlike_operands(core, TritonSemantic)
    _keep_constants(TritonSemantic)
    _broadcast_only_unlike_shapes(TritonSemantic)
    interpreter.TensorHandle.__post_init__ = lambda self: None
    gc.set_threshold(100_000, 50, 50)  # every value is several objects, which go without the collector


def _replace_languages_once(interpreter: Any) -> None:
    replace = interpreter._patch_lang
    replaced: set[tuple[str, ...]] = set()

    def replace_once(fn: Any) -> Any:
        languages = _languages(fn, interpreter)
        if languages in replaced:
            return interpreter._LangPatchScope()  # with nothing to restore
        scope = replace(fn)
        replaced.add(languages)
        restore = scope.restore

        def forget() -> None:
            restore()
            replaced.clear()

        scope.restore = forget
        return scope

    interpreter._patch_lang = replace_once


def _languages(fn: Any, interpreter: Any) -> tuple[str, ...]:
    """Under which of its modules `fn` sees the language."""
    seen = fn.__globals__.values()
    return tuple(module.__name__ for module in (interpreter.tl, interpreter.tl.core) if any(v is module for v in seen))


def _keep_shapes(core: Any) -> None:
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = builtins.tuple(one.value if isinstance(one, core.constexpr) else one for one in shape)
        if key not in of_types:
            make_type(self, element_ty, shape)
            of_types[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = of_types[key]
        self.name = f"<{text}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = builtins.tuple(type.shape.values) if type.is_block() else ()
        if key not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[key]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _keep_numpy_types(core: Any, interpreter: Any) -> None:
    find = interpreter._get_np_dtype
    found: dict[Any, Any] = {}

    def numpy_type(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, core.block_type) else of
        if isinstance(scalar, core.pointer_type):
            return find(scalar)
        if scalar not in found:
            found[scalar] = find(scalar)
        return found[scalar]

    interpreter._get_np_dtype = numpy_type


def _call_at_once(core: Any, interpreter: Any) -> None:
    wrapper = core.builtin(lambda: None).__code__

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.TritonSemantic(builder)
        called = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return called(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


def _promote_only_unlike_operands(core: Any, semantic: Any) -> None:
    promote = semantic.binary_op_type_checking_impl
    divided_as_they_are = {core.float32, core.float64, core.int32, core.int64}
    blocks: dict[Any, Any] = {}

    def beside_a_number(self: Any, lhs: Any, rhs: Any, *rules: bool) -> Any:
        first = type(lhs) is core.tensor
        block, number = (lhs, rhs) if first else (rhs, lhs)
        key = number, type(number), block.dtype.name, id(block.shape), first, rules
        if key in blocks:
            return (block, blocks[key]) if first else (blocks[key], block)
        promoted = promote(self, lhs, rhs, *rules)
        if promoted[not first] is block:
            blocks[key] = promoted[first]
        return promoted

    def promote_unlike(self: Any, lhs: Any, rhs: Any, *rules: bool) -> Any:
        if (
            type(lhs) is type(rhs) is core.tensor
            and lhs.dtype is rhs.dtype
            and type(lhs.dtype) is core.dtype
            and lhs.shape is rhs.shape
            and (not any(rules[3:]) or lhs.dtype in divided_as_they_are)
        ):
            return lhs, rhs
        kinds = {type(lhs), type(rhs)}
        if core.tensor in kinds and not kinds.isdisjoint((int, float)):
            return beside_a_number(self, lhs, rhs, *rules)
        return promote(self, lhs, rhs, *rules)

    semantic.binary_op_type_checking_impl = promote_unlike


def _keep_constants(semantic: Any) -> None:
    make = semantic.scalar_constant
    made: dict[Any, Any] = {}

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        if type(value) not in (int, float) or dtype is None:
            return make(self, value, dtype)
        key = value, type(value), dtype.name
        if key not in made:
            made[key] = make(self, value, dtype)
        return made[key]

    semantic.scalar_constant = constant


def _broadcast_only_unlike_shapes(semantic: Any) -> None:
    broadcast = semantic.broadcast_impl_value

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = (value.type.shape.values if value.type.is_block() else None for value in (lhs, rhs))
        return (lhs, rhs) if one == other else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_unlike
