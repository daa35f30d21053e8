"""Types of texts that name something outside of the program: runs, folders and files, Weights & Biases. No torch here."""

import os
import re
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator

from llmtrain.config.addresses import local_problem
from llmtrain.config.base import setting_error

_LONGEST_NAME = 100
_LONGEST_PATH, _LONGEST_PART = 4000, 255
"""Bytes; file systems take no longer part of a path."""


def _checked(problem: Callable[[str], str | None]) -> AfterValidator:
    def check(text: str) -> str:
        if reason := problem(text):
            raise setting_error(reason)
        return text

    return AfterValidator(check)


def _run_name_problem(text: str) -> str | None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        return "use letters, digits, '.', '_' and '-' only"
    return f"use at most {_LONGEST_NAME} characters" if len(text) > _LONGEST_NAME else None


def path_problem(text: str) -> str | None:
    """Reason why a text is no path; None if it is one."""
    if not text.strip():
        return "names no file or folder"
    if not text.isprintable():
        return "a path has printable characters only"
    encoded = os.fsencode(text)
    if len(encoded) > _LONGEST_PATH or any(len(part) > _LONGEST_PART for part in encoded.split(b"/")):
        return f"a path has at most {_LONGEST_PATH} bytes, and {_LONGEST_PART} between two slashes"
    user = text.partition("/")[0]
    if user.startswith("~") and os.path.expanduser(user) == user:
        return f"there is no home folder of {user}; write the whole path"
    return None


def _label_problem(text: str) -> str | None:
    if not text.strip() or not text.isprintable() or len(text) > 128:
        return "Weights & Biases takes 1 to 128 printable characters"
    if bad := re.search(r"[/\\#?%:]", text):
        return f"Weights & Biases takes no '{bad[0]}' in a name"
    return None


def _tag_problem(text: str) -> str | None:
    return None if 0 < len(text) <= 64 else "Weights & Biases takes tags of 1 to 64 characters"


RunName = Annotated[str, _checked(_run_name_problem)]
"""Name of a run, which is also a folder's."""
PathText = Annotated[str, _checked(path_problem)]
"""Path of a file or folder, which need not exist; or an address."""
LocalPath = Annotated[PathText, _checked(local_problem), AfterValidator(os.path.expanduser)]
"""Path of a file or folder that is written on this machine; `~` is the user's home."""
WandbName = Annotated[str, _checked(_label_problem)]
WandbTag = Annotated[str, _checked(_tag_problem)]
