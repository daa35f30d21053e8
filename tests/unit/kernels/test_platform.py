"""Vendor and architecture, from what torch reports."""

from types import SimpleNamespace

import pytest
import torch

from llmtrain.kernels import platform


def test_a_cpu_has_its_memory():
    here = platform.detect("cpu")
    assert (here.vendor, here.arch, here.device_type) == ("cpu", "cpu", "cpu")
    assert here.memory_bytes > 1 << 28


@pytest.mark.parametrize(
    "hip, properties, vendor, arch",
    [
        (None, {"major": 9, "minor": 0, "name": "NVIDIA H200"}, "nvidia", "sm90"),
        ("7.0", {"gcnArchName": "gfx942:sramecc+:xnack-", "name": "AMD Instinct MI300X"}, "amd", "gfx942"),
    ],
)
def test_gpus(monkeypatch, hip, properties, vendor, arch):
    monkeypatch.setattr(torch.version, "hip", hip)
    reported = SimpleNamespace(total_memory=1 << 37, multi_processor_count=132, **properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: reported)
    found = platform.detect("cuda")
    assert found == platform.Platform(vendor, arch, properties["name"], 1 << 37, 132)
    assert found.device_type == "cuda"


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="meta"):
        platform.detect("meta")
