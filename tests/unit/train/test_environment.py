"""train.environment: which variables a rank sets, and when."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from llmtrain.errors import UserError
from llmtrain.kernels.platform import PRESETS
from llmtrain.schema.environment import Environment
from llmtrain.schema.load import load_config
from llmtrain.train import worker
from llmtrain.train.environment import apply_environment, wanted_variables

MPT = Path(__file__).parents[3] / "yamls" / "pretrain" / "mpt-125m.yaml"


def test_nothing_is_set_unless_asked():
    for vendor in PRESETS:
        assert wanted_variables(Environment(), vendor, "run") == {}


@pytest.mark.parametrize("vendor", ["amd", "nvidia", "cpu"])
def test_a_preset_is_that_of_the_vendor(vendor):
    assert wanted_variables(Environment(preset="vendor"), vendor, "run") == PRESETS[vendor]


def test_variables_go_before_the_preset():
    config = Environment(preset="vendor", variables={"NCCL_IB_GID_INDEX": 1, "NCCL_DEBUG": "INFO"})
    found = wanted_variables(config, "amd", "run")
    assert (found["NCCL_IB_GID_INDEX"], found["NCCL_DEBUG"], found["NCCL_CROSS_NIC"]) == ("1", "INFO", "0")


def test_what_the_process_has_stays_and_is_reported():
    has = {"NCCL_DEBUG": "WARN", "NCCL_CROSS_NIC": "1", "HOME": "/home"}
    config = Environment(variables={"NCCL_DEBUG": "INFO", "NCCL_CROSS_NIC": 1, "NCCL_ALGO": "Ring"})
    lines = apply_environment(config, "nvidia", "run", has)
    assert has == {"NCCL_DEBUG": "WARN", "NCCL_CROSS_NIC": "1", "HOME": "/home", "NCCL_ALGO": "Ring"}
    assert lines == ["environment: NCCL_DEBUG=WARN, as the process has it, and not INFO", "environment: NCCL_ALGO=Ring"]


@pytest.mark.parametrize(("mode", "tuning"), [("tune", "1"), ("use", "0")])
def test_tunable_op_has_a_file_for_each_gpu(tmp_path, mode, tuning):
    has: dict[str, str] = {}
    apply_environment(Environment(tunable_op=mode), "amd", str(tmp_path), has)
    assert has["PYTORCH_TUNABLEOP_ENABLED"] == "1" and has["PYTORCH_TUNABLEOP_TUNING"] == tuning
    assert has["PYTORCH_TUNABLEOP_FILENAME"] == str(tmp_path / "tunableop" / "results%d.csv")
    assert (tmp_path / "tunableop").is_dir() == (mode == "tune")


def test_results_of_tunable_op_that_are_not_there_are_missed(tmp_path):
    config = Environment(tunable_op="use", tunable_op_folder=str(tmp_path))
    said = f"environment: there is no {tmp_path}/results%d.csv, and so nothing for tunable_op: use; tune writes it"
    assert apply_environment(config, "amd", "run", {})[-1] == said
    (tmp_path / "results0.csv").touch()
    assert said not in apply_environment(config, "amd", "run", {})


def test_an_earlier_tuning_lies_elsewhere(tmp_path):
    config = Environment(tunable_op="use", tunable_op_folder=str(tmp_path))
    assert wanted_variables(config, "amd", "run")["PYTORCH_TUNABLEOP_FILENAME"] == f"{tmp_path}/results%d.csv"


def test_hipblaslt_reads_a_tuning_that_is_there_on_amd_alone(tmp_path):
    file = tmp_path / "tuned.txt"
    config, has = Environment(hipblaslt_tuning=str(file)), {}
    with pytest.raises(UserError, match=r"train.environment.hipblaslt_tuning '.*tuned.txt' is no file of this machine"):
        apply_environment(config, "amd", "run", has)
    file.write_text("Git Version: 1\n")
    assert apply_environment(config, "amd", "run", has) == [f"environment: HIPBLASLT_TUNING_OVERRIDE_FILE={file}"]
    assert has == {"HIPBLASLT_TUNING_OVERRIDE_FILE": str(file)} and wanted_variables(config, "nvidia", "run") == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variables": {"nccl debug": "INFO"}}, "is no name of a variable"),
        ({"variables": {"LOCAL_RANK": 1}}, "is the launcher's"),
        ({"variables": {"MASTER_ADDR": "host"}}, "is the launcher's"),
        ({"tunable_op_folder": "x"}, "has no effect with tunable_op: off"),
        *(
            ({"variables": {"NCCL_DEBUG": value}}, "1 validation error(.|\n)*expected a text that is not empty")
            for value in (True, 1.5, "", None, [1])
        ),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        Environment.model_validate(settings)


def test_a_rank_sets_them_before_anything_else(monkeypatch):
    """Before the run's folder is held, for which ranks of several already talk to each other."""
    variables = "train.environment.variables={OF_A_TEST: here}"
    seen = []

    def hold(*_: object) -> None:
        seen.append(os.environ.get("OF_A_TEST"))
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "_hold", hold)
    monkeypatch.setenv("OF_A_TEST", "")
    monkeypatch.delenv("OF_A_TEST")
    worker.run_rank(lambda ranks: load_config(MPT, [variables]), str(MPT), [], fresh=False)
    assert seen == ["here"]
