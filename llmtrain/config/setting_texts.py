"""Texts of a section's settings: the string after each in its class."""

import ast
import functools
import inspect
import textwrap


@functools.cache
def setting_texts(section: type) -> dict[str, str]:
    """Text of each setting that has one, with those of inherited settings.

    It is read from the source, for as long as the import of all sections takes, and so only by who asks: pydantic's own
    `use_attribute_docstrings` does it at each import.
    """
    texts: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if "__annotations__" not in vars(cls) or cls.__module__.partition(".")[0] == "pydantic":
            continue
        for name in vars(cls)["__annotations__"]:
            texts.pop(name, None)
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for setting, text in zip(definition.body, definition.body[1:], strict=False):
            match setting, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(found))):
                    texts[name] = inspect.cleandoc(found)
    return texts
