"""Answers of nvidia-smi and amd-smi."""

import json

import pytest

from llmtrain.doctor.cluster_tools import GpuState, amd, nvidia, pci_key

GPUS = "00000000:18:00.0, 0\n00000000:2A:00.0, 3\n00000000:3B:00.0, [N/A]\n"
ROWS = "00000000:18:00.0, 1, 0, No, No\n00000000:2A:00.0, 0, 2, Yes, 1\n"


def test_nvidia_smi_by_gpu():
    users = "00000000:2A:00.0, 4711, python3\n00000000:2A:00.0, 4712, [Not Found]\n"
    assert nvidia(GPUS, ROWS, users) == {
        "0:18:0": GpuState(0, 1),
        "0:2a:0": GpuState(3, 2, pending=True, failed=True, processes=("4711 python3", "4712 [Not Found]")),
        "0:3b:0": GpuState(None, None),
    }


def test_nvidia_smi_without_remapped_rows_or_processes():
    assert nvidia(GPUS, "No devices were found with remapped rows\n", "")["0:18:0"] == GpuState(0, None)


def test_nvidia_smi_with_other_columns_is_refused():
    with pytest.raises(ValueError, match="are not 5 values"):
        nvidia(GPUS, "00000000:18:00.0, 1\n", "")


@pytest.mark.parametrize("wrapped", [False, True])
def test_amd_smi_by_gpu(wrapped):
    def answer(*entries):
        return json.dumps({"gpu_data": entries} if wrapped else entries)

    listed = answer({"gpu": 0, "bdf": "0000:05:00.0"}, {"gpu": 1, "bdf": "0000:26:00.0"})
    ecc = answer(
        {"gpu": 0, "ecc": {"total_correctable_count": 9, "total_uncorrectable_count": 0}}, {"gpu": 1, "ecc": "N/A"}
    )
    pages = answer({"gpu": 0, "retired": "No bad pages found."}, {"gpu": 1, "retired": [{}, {}], "pending": [{}]})
    users = answer(
        {"gpu": 0, "process_list": [{"process_info": "No running processes detected"}]},
        {"gpu": 1, "process_list": [{"process_info": {"name": "python3", "pid": 42}}]},
    )
    assert amd(listed, ecc, pages, users) == {
        "0:5:0": GpuState(0, 0),
        "0:26:0": GpuState(None, 3, pending=True, processes=("42 python3",)),
    }


@pytest.mark.parametrize("text", ["", "no GPU", "{}", '[{"bdf": 1}]', "[1]"])
def test_amd_smi_that_answers_otherwise_is_refused(text):
    with pytest.raises(ValueError, match="amd-smi's answer cannot be read"):
        amd(text, "[]", "[]", "[]")


@pytest.mark.parametrize("address", ["00000000:18:00.0", "0000:18:00.0", "0:18:0"])
def test_one_key_for_an_address(address):
    assert pci_key(address) == "0:18:0"


def test_no_address():
    with pytest.raises(ValueError, match="no PCI address"):
        pci_key("GPU-18")
