"""Triton's interpreter, faster: what it does over and over and our tests do not need."""

from __future__ import annotations

from typing import Any


def speed_up() -> None:
    """To be called once in a process that interprets kernels (TRITON_INTERPRET=1), before the first of them.

    - Every call of a device function replaces the whole of `triton.language` anew. The launch has done that already.
    - Every integer sum is computed a second time in 64 bits, to see whether it overflows: not at the sizes of a test.
    """
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
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
