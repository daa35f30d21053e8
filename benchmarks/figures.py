"""Figures of a benchmark as plain data."""

from __future__ import annotations

from typing import Any


def rounded(value: Any) -> Any:
    """Round all numbers in a structure of figures."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
