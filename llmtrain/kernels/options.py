"""Launch parameters as text, which is how an operator takes them. No torch here."""

from __future__ import annotations

import functools
import json
from typing import Any, Self

from llmtrain.kernels.tuning_files import decode, encode


class Options:
    """What a dataclass of launch parameters inherits. As text they are in a compiled graph, which then says how its kernels
    run, on any rank.
    """

    def dump(self) -> str:
        return json.dumps(encode(self), sort_keys=True)

    @classmethod
    def parse(cls, dumped: str) -> Self:
        return _parsed(cls, dumped)


@functools.cache
def _parsed(kind: type, dumped: str) -> Any:
    return decode(kind, json.loads(dumped), "launch")
