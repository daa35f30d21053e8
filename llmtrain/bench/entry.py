"""End of every bench, whether it is run by `python -m` or from a script."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def end_with(main: Callable[[], int | None]) -> NoReturn:
    """Leaves Python with main's status: 0 done, 1 failed on the way, 2 the request was wrong, 130 interrupted.

    A ValueError that this package raised is addressed to the user, and its text is the whole story. One that a library
    raised is a fault on the way, and shows its traceback: a measurement on a rented machine is not easily repeated.
    """
    sys.exit(status_of(main))


def status_of(main: Callable[[], int | None]) -> int:
    try:
        return main() or 0
    except ValueError as error:
        if not _ours(error):
            traceback.print_exc()
            return 1
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _ours(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    *_, (last, _) = frames
    return last.f_globals.get("__name__", "").partition(".")[0] in ("llmtrain", "__main__")
