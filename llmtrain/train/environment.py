"""train.environment: variables set before anything reads them."""

import os
from collections.abc import MutableMapping
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.kernels.platform import PRESETS, Vendor
from llmtrain.schema.environment import Environment


def wanted_variables(config: Environment, vendor: Vendor, run_dir: str) -> dict[str, str]:
    """Variables of the section, by name; `variables` go before the rest."""
    found = dict(PRESETS[vendor]) if config.preset == "vendor" else {}
    if config.tunable_op != "off":
        folder = Path(config.tunable_op_folder or Path(run_dir) / "tunableop")
        found |= {
            "PYTORCH_TUNABLEOP_ENABLED": "1",
            "PYTORCH_TUNABLEOP_TUNING": "1" if config.tunable_op == "tune" else "0",
            "PYTORCH_TUNABLEOP_FILENAME": str(folder / "results%d.csv"),  # %d: the GPU's number
        }
    if config.hipblaslt_tuning is not None and vendor == "amd":
        found["HIPBLASLT_TUNING_OVERRIDE_FILE"] = str(Path(config.hipblaslt_tuning).absolute())
    return found | {name: str(value) for name, value in config.variables.items()}


def apply_environment(
    config: Environment, vendor: Vendor, run_dir: str, environment: MutableMapping[str, str] = os.environ
) -> list[str]:
    """Sets the variables that the process does not have. Returns a line for each. Called before a GPU or a process group is
    initialised. Raises UserError for a tuning that is not there, without which hipBLASLt would go on in silence."""
    tuning = config.hipblaslt_tuning
    if tuning is not None and vendor == "amd" and not Path(tuning).is_file():
        raise UserError(f"train.environment.hipblaslt_tuning {tuning!r} is no file of this machine")
    lines = []
    for name, value in wanted_variables(config, vendor, run_dir).items():
        kept = environment.get(name)
        if kept is None:
            environment[name] = value
            lines.append(f"environment: {name}={value}")
        elif kept != value:
            lines.append(f"environment: {name}={kept}, as the process has it, and not {value}")
    results = Path(environment.get("PYTORCH_TUNABLEOP_FILENAME", ""))  # PyTorch adds the number to a name without %d
    if config.tunable_op == "tune":
        results.parent.mkdir(parents=True, exist_ok=True)
    elif config.tunable_op == "use" and not any(
        results.parent.glob(f"{results.stem.replace('%d', '')}*{results.suffix}")
    ):
        lines.append(f"environment: there is no {results}, and so nothing for tunable_op: use; tune writes it")
    return lines
