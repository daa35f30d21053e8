"""Command lines of the programs: `a.b=c` settings anywhere, numbers that are checked before anything is computed."""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

_SETTING = re.compile(r"[A-Za-z_][\w.]*=")


class Parser(argparse.ArgumentParser):
    """Arguments of the program whose `__name__` and `__doc__` are given. config: a run's YAML (`file`) and settings
    (`overrides`) come first. out: --out names a file of rows."""

    def __init__(self, module: str, doc: str | None, *, config: bool = False, out: bool = False):
        name = module.rpartition(".")[2]
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"python -m benchmarks {name}", description=doc, formatter_class=raw, allow_abbrev=False)
        self.config = config
        if out:
            self.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures there, row by row")
        if config:
            self.add_argument("file", metavar="FILE", help="a run's YAML")
            self.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings of it")

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The arguments, those of the process by default. No option's value may look like a setting where there is `overrides`."""
        if not self.config:
            return self.parse_args(argv)
        given = sys.argv[1:] if argv is None else argv
        # argparse would have --lengths of `--lengths 64 128 a.b=c` take the setting too.
        args = self.parse_intermixed_args([one for one in given if not _SETTING.match(one)])
        args.overrides = [*args.overrides, *(one for one in given if _SETTING.match(one))]
        return args


def _checked(value: float, text: str, valid: bool, expected: str) -> float:
    if not valid:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
    return value


def _value(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def natural(text: str) -> int:
    """Integer from 0 on."""
    value = _value(text)
    return int(_checked(value, text, value >= 0 and value.is_integer(), "an integer from 0 on"))


def positive(text: str) -> int:
    """Positive integer."""
    value = _value(text)
    return int(_checked(value, text, value >= 1 and value.is_integer(), "a positive integer"))


def number(text: str) -> float:
    """Positive, finite number."""
    value = _value(text)
    return _checked(value, text, 0 < value < math.inf, "a positive number")
