"""Device names as drivers report them, and the near misses that must get no peak at all."""

import pytest

from llmtrain.flops.peaks import DEVICES, dense_peak, device_by_short_name, find_device


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("A100-SXM4-80GB", "a100"),  # older drivers leave the vendor out
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI210", "mi210"),
        ("AMD Instinct MI250", "mi250"),
        ("AMD Instinct MI250X", "mi250x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("AMD Instinct MI350X", "mi350x"),
        ("AMD Instinct MI355X", "mi355x"),
    ],
)
def test_a_reported_name_finds_its_row(name, short):
    device = find_device(name)
    assert device is not None
    assert device.short == short


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10",
        "NVIDIA A100",  # no such report; memory unknown
        "NVIDIA A100X",
        "NVIDIA A800-SXM4-80GB",
        "NVIDIA A100-SXM-64GB",  # Leonardo's custom chip has more multiprocessors
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H100",
        "NVIDIA H800",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA GH200 480GB",
        "NVIDIA B200A",
        "NVIDIA L40",
        "NVIDIA A10G-8Q",  # a virtual GPU
        "NVIDIA H20-3e",
        "NVIDIA B300",  # no such report
        "NVIDIA GB300 MIG 1g.35gb",
        "NVIDIA GeForce RTX 4090",
        "AMD Instinct MI100",
        "AMD Instinct MI300A",
        "AMD Instinct MI308X",
        "AMD Radeon Graphics",  # what an outdated amdgpu.ids calls every Instinct
        "Tesla V100-SXM2-32GB",
        "",
    ],
)
def test_an_unknown_name_gets_no_peak(name):
    assert find_device(name) is None


def test_a_slice_under_the_whole_devices_name_gets_no_peak():
    assert find_device("AMD Instinct MI300X", compute_units=304) is device_by_short_name("mi300x")
    assert find_device("AMD Instinct MI300X", compute_units=38) is None


@pytest.mark.parametrize(("units", "short"), [(104, "mi250"), (110, "mi250x")])
def test_compute_units_tell_apart_what_a_shared_name_does_not(units, short):
    device = find_device("AMD Instinct MI250X/MI250", compute_units=units)
    assert device is not None
    assert device.short == short
    assert find_device("AMD Instinct MI250X / MI250") is None


def test_a_virtual_function_counts_only_when_it_is_the_whole_gpu():
    assert find_device("AMD Instinct MI300X VF") is None
    assert find_device("AMD Instinct MI300X VF", compute_units=152) is None
    assert find_device("AMD Instinct MI300X VF", compute_units=304) is device_by_short_name("mi300x")


def test_two_chip_packages_count_one_chip_per_device():
    """The data sheets give 362.1 and 383 TFLOP/s for the package that torch shows as two devices."""
    assert 2 * device_by_short_name("mi250").tflops["bf16"] == pytest.approx(362.1)
    assert 2 * device_by_short_name("mi250x").tflops["bf16"] == pytest.approx(383.0)


def test_short_names_ignore_case_and_list_the_choices():
    assert device_by_short_name("MI300X").short == "mi300x"
    with pytest.raises(ValueError, match=r"known: a100, .*mi355x"):
        device_by_short_name("v100")
    with pytest.raises(ValueError, match="did you mean h100-sxm or h100-pcie or h100-nvl"):
        device_by_short_name("h100")


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.short)
def test_every_row_is_complete_and_ordered_by_precision(device):
    peaks = device.tflops
    assert device.source
    assert find_device(device.names[0], device.compute_units) is device
    assert peaks["fp32"] < peaks["bf16"] == peaks["fp16"]
    if "fp8" in peaks:
        assert 1.9 < peaks["fp8"] / peaks["bf16"] < 2.1


@pytest.mark.parametrize(
    ("short", "bf16"),
    {
        "gb200": 2500,
        "b300": 2250,
        "gb300": 2500,
        "b200": 2250,
        "h20": 148,
        "a10g": 70,
        "l4": 121,
        "mi350x": 2300,
    }.items(),
)
def test_peaks_are_dense_and_of_one_gpu(short, bf16):
    """NVIDIA prints GB200 and GB300 by superchip of two GPUs, and most figures with sparsity, twice the dense ones."""
    assert device_by_short_name(short).tflops["bf16"] == bf16


def test_train_precision_names_its_column():
    h200 = device_by_short_name("h200")
    assert dense_peak(h200, "amp_bf16").flops == h200.peak("bf16") == 989.5e12
    assert dense_peak(h200, "fp32").flops == 67e12
    assert dense_peak(h200, "fp32").source == "NVIDIA H200 SXM"


@pytest.mark.parametrize("short", [None, "h200"])
def test_a_peak_in_the_config_goes_before_the_table(short):
    peak = dense_peak(short and device_by_short_name(short), "amp_bf16", tflops=125.0)
    assert (peak.flops, peak.source) == (125e12, "train.peak_tflops")


def test_without_a_peak_the_key_that_gives_one_is_named():
    unknown = dense_peak(None, "amp_bf16", name="'NVIDIA A10' with 72 multiprocessors")
    assert unknown.flops is None
    assert "'NVIDIA A10' with 72 multiprocessors; set train.peak_tflops" in unknown.source
    mi210 = dense_peak(device_by_short_name("mi210"), "fp8")
    assert mi210.flops is None and "AMD Instinct MI210 at train.precision fp8; set train.peak_tflops" in mi210.source
