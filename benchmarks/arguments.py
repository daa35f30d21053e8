"""Command lines of benchmarks that take settings: `a.b=c` anywhere, also behind an option that takes several values."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

_SETTING = re.compile(r"[A-Za-z_][\w.]*=")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, those of the process by default; the settings among them are in `overrides`.

    parser: has a positional `overrides` of any number, and no option with a value that looks like a setting.
    """
    given = sys.argv[1:] if arguments is None else arguments
    # argparse would have --lengths of `--lengths 64 128 a.b=c` take the setting too.
    args = parser.parse_intermixed_args([one for one in given if not _SETTING.match(one)])
    args.overrides = [*args.overrides, *(one for one in given if _SETTING.match(one))]
    return args
