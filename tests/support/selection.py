"""Selection of the cases of a long list that run by default: the rest is marked slow."""

from typing import Any

import pytest


def cases(every: dict[str, Any], *default: str) -> list[Any]:
    """Parameters named by the keys (a tuple is several arguments); those that `default` does not name are slow."""
    assert set(default) <= every.keys(), set(default) - every.keys()
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), id=name, marks=() if name in default else pytest.mark.slow
        )
        for name, case in every.items()
    ]
