"""The `train.environment` section of the YAML. No torch here."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from llmtrain.config.base import Problem, Section, free, setting_error
from llmtrain.config.texts import LocalPath

_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_OF_THE_LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|(TORCHELASTIC|LLMTRAIN)_.*"
)


def _parse_variable(value: Any) -> Any:
    """A text that is not empty, or a whole number."""
    if type(value) is int or (isinstance(value, str) and value):
        return value
    raise setting_error(
        "expected a text that is not empty, in quotes where YAML reads something else, or a whole number"
    )


Variable = Annotated[Annotated[str, Field(min_length=1)] | int, BeforeValidator(_parse_variable)]


class Environment(Section):
    """Environment variables that each rank sets before it touches a GPU, and prints. Those that the process has already stay as
    they are, so that a shell can try another value."""

    preset: Literal["none", "vendor"] = free("none")
    """vendor: what training launchers set on GPUs of the vendor, for queues, memory and RCCL (llmtrain/kernels/platform.py)."""
    tunable_op: Literal["off", "use", "tune"] = free("off")
    """PyTorch's TunableOp for matrix products, which on AMD chooses between hipBLASLt and rocBLAS. tune: time the candidates of
    every new shape, and write the fastest to the folder; use: read them there, and time nothing."""
    tunable_op_folder: str | None = free(None)
    """Folder of the results. Default: RUN/tunableop."""
    hipblaslt_tuning: LocalPath | None = free(None)
    """On AMD, a file of solutions that were tuned for hipBLASLt (by its HIPBLASLT_TUNING_FILE, or hipblaslt-bench), which takes
    them for the products in it. It belongs to one version of hipBLASLt. Other vendors' GPUs pass it over."""
    variables: dict[str, Variable] = free({})
    """Further variables, `{NCCL_IB_GID_INDEX: 3}`; they go before those of the preset."""

    def problems(self) -> Iterator[Problem]:
        for name, value in self.variables.items():
            if not _NAME.fullmatch(name):
                yield Problem(f"variables.{name}", value, "is no name of a variable; it has capitals, digits and _")
            elif _OF_THE_LAUNCHER.fullmatch(name):
                yield Problem(f"variables.{name}", value, "is the launcher's")
        if self.tunable_op_folder is not None and self.tunable_op == "off":
            yield self.problem_at("tunable_op_folder", "has no effect with tunable_op: off")
