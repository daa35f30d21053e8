"""What a start imports: the heavy libraries in sys.modules of a process of its own."""

import json
import sys

import pytest

from tests.support.processes import output_of

HEAVY = (
    *("torch", "composer", "streaming", "torchmetrics", "transformers", "torchao", "matplotlib", "wandb", "datasets"),
    *("peft", "lm_eval", "tensorboard", "pyarrow", "boto3", "torchvision", "scipy", "mcli", "accelerate"),
    *("cpuinfo", "torchmetrics.classification", "torchmetrics.functional.text"),
)
PROGRAM = """
import json, sys
from llmtrain import cli
def show(): print("LOADED", json.dumps([name for name in sys.argv[1].split(",") if name in sys.modules]))
if sys.argv[2] == "import":
    show()
elif sys.argv[2] == "train":
    import llmtrain.start as report  # before start_report, which imports Composer, takes the function from there
    report.table = lambda parts: show() or []  # at the end of the first step
    sys.exit(cli.main(sys.argv[2:]))
else:
    status = cli.main(sys.argv[2:])
    show()
    sys.exit(status)
"""


def loaded(*command: str) -> set[str]:
    printed = output_of(sys.executable, "-c", PROGRAM, ",".join(HEAVY), *command)
    [line] = [line for line in printed.splitlines() if line.startswith("LOADED ")]
    return set(json.loads(line.removeprefix("LOADED ")))


def test_the_command_line_parses_without_any_of_them():
    assert loaded("import") == set()


@pytest.mark.ci
def test_describe_has_neither_composer_nor_data():
    assert loaded("describe", "quickstart") <= {"torch", "transformers", "torchvision", "boto3", "accelerate"}


@pytest.mark.ci
def test_the_first_step_waits_for_nothing_that_it_does_not_use(project):
    project.write({"logging.wandb": {"project": "p"}, "logging.tensorboard": True})
    assert loaded("train", str(project.folder / "run.yaml")) == {"torch", "composer", "streaming", "torchmetrics"}
