"""Which backend serves what, and what a refusal says."""

import pytest

from llmtrain.kernels import platform, registry
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.experts.spec import ExpertsSpec
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.kimi_delta.spec import KimiDeltaSpec
from llmtrain.kernels.mamba3.spec import Mamba3Spec
from llmtrain.kernels.mamba_mixer.spec import MambaMixerSpec
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.kernels.ssd.spec import SSDSpec
from llmtrain.models.mixers.gated_deltanet_segments import with_transition
from tests.support.processes import modules_after

CPU = platform.cpu()
H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30)
A100 = Platform("nvidia", "sm80", "NVIDIA A100", 80 << 30)
MI300X = Platform("amd", "gfx942", "AMD Instinct MI300X", 192 << 30)
PLAIN = AttentionSpec(16, 16, 128, 128**-0.5)


def spec(**changes) -> AttentionSpec:
    return AttentionSpec(**{**vars(PLAIN), **changes})


def chosen(name: str, wanted: AttentionSpec, where: Platform) -> str:
    return registry.resolve("attention", name, wanted, where).name


@pytest.mark.parametrize(
    "where, wanted, expected",
    [
        (H200, PLAIN, "sdpa:cudnn"),
        (A100, PLAIN, "sdpa:flash"),
        (MI300X, PLAIN, "sdpa:flash"),
        (CPU, PLAIN, "sdpa:cpu"),
        (H200, spec(dtype="float32"), "sdpa:efficient"),
        (H200, spec(alibi_max_bias=8.0, dtype="float32"), "flex"),
        (A100, spec(alibi_max_bias=8.0), "flex"),
        (MI300X, spec(sliding_window=1024), "flex"),
        (H200, spec(head_dim=96), "sdpa:cudnn"),
        (H200, spec(head_dim=40, documents=True), "varlen"),
        (H200, spec(head_dim=248), "sdpa:cudnn"),
        (CPU, spec(softcap=50.0), "reference"),
        (H200, spec(softcap=50.0, head_dim=12), "reference"),
        (MI300X, spec(documents=True), "flex"),
        (CPU, spec(documents=True), "reference"),
    ],
)
def test_auto_takes_the_public_kernel_where_nothing_is_measured(where, wanted, expected):
    assert chosen("auto", wanted, where) == expected


@pytest.mark.parametrize("where, expected", [(H200, "sdpa:cudnn"), (A100, "sdpa:flash"), (CPU, "sdpa:cpu")])
def test_a_family_resolves_to_the_kernel_it_means(where, expected):
    assert chosen("sdpa", PLAIN, where) == expected


@pytest.mark.parametrize(
    "name, wanted, where, words",
    [
        ("sdpa:flash", spec(alibi_max_bias=8.0), None, ["flash", "no ALiBi"]),
        ("sdpa:cudnn", spec(softcap=50.0), None, ["cuDNN", "no softcap"]),
        (
            "sdpa",
            spec(softcap=50.0),
            None,
            ["softcap", "(can serve, where the machine has them: auto, reference, flex, triton"],
        ),
        ("sdpa", spec(softcap=50.0), CPU, ["SDPA has no softcap", "can serve: auto, reference)"]),
        ("sdpa:cudnn", spec(documents=True), None, ["cuDNN", "no document mask"]),
        ("sdpa", spec(documents=True), CPU, ["SDPA has no document mask", "can serve: auto, reference)"]),
        ("sdpa:cudnn", PLAIN, MI300X, ["NVIDIA", "sdpa:flash"]),
        ("sdpa:cudnn", spec(head_dim=160), A100, ["up to 256 on Hopper (sm90), up to 128 elsewhere, not 160"]),
        ("sdpa:cudnn", spec(head_dim=264), H200, ["up to 256, not 264"]),
        ("sdpa:flash", spec(dtype="float32"), H200, ["bfloat16", "amp_bf16"]),
        ("sdpa:flash", PLAIN, CPU, ["needs a GPU", "sdpa:cpu"]),
        ("flex", PLAIN, CPU, ["no backward pass on CPUs"]),
        ("flex", spec(head_dim=8), None, [">= 16", "8"]),
        ("triton", PLAIN, CPU, ["need a GPU"]),
        ("triton", spec(head_dim=264), None, ["up to 256, not 264"]),
        (
            "triton",
            spec(lower_right=True, alibi_max_bias=8.0),
            None,
            [
                "(train.parallel.context) (can serve, where the machine has them: auto, reference, sdpa:efficient, sdpa:cpu, flex)"
            ],
        ),
        (
            "triton",
            spec(lower_right=True, softcap=50.0, sliding_window=64, head_dim=8),
            None,
            ["(train.parallel.context) (can serve, where the machine has them: auto, reference)"],
        ),
        ("triton", spec(dtype="float64"), None, ["bfloat16, float16, float32, not float64"]),
    ],
)
def test_a_refusal_gives_the_reason_and_what_can_serve(name, wanted, where, words):
    reason = registry.refusal("attention", name, wanted, where)
    assert reason is not None
    assert all(word in reason for word in words), reason
    if where is not None:
        with pytest.raises(ValueError, match="cannot serve here"):
            registry.resolve("attention", name, wanted, where)


@pytest.mark.parametrize("head_dim", [136, 160, 256])
def test_cudnn_has_wide_heads_on_hopper_where_it_is_named(head_dim):
    assert chosen("sdpa:cudnn", spec(head_dim=head_dim), H200) == "sdpa:cudnn"


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"documents": True, "head_dim": 40}, "varlen"),
        ({"documents": True, "sliding_window": 64, "head_dim": 40}, "varlen"),
        ({"sliding_window": 64, "head_dim": 40}, "flex"),
    ],
)
def test_masks_that_no_cell_has_go_to_the_public_kernel_that_is_ahead_in_other_cells(changes, first):
    """Cells begin at 48 columns."""
    assert not registry.measured("attention", "auto", spec(**changes), H200)
    assert chosen("auto", spec(**changes), H200) == first


def test_widths_between_those_of_cells_are_predicted():
    found = registry.measured("attention", "auto", spec(sliding_window=64, head_dim=208), H200)
    assert {one.backend for one in found} >= {"triton", "varlen"} and all(one.predicted for one in found)


def test_platform_reasons_wait_for_a_platform():
    assert registry.refusal("attention", "sdpa:cudnn", PLAIN, None) is None
    assert registry.refusal("attention", "sdpa:cudnn", spec(head_dim=160), None) is None
    assert registry.refusal("attention", "flex", PLAIN, None) is None


def test_an_unknown_backend_is_named_with_those_that_exist():
    with pytest.raises(
        ValueError, match=r"no attention backend named 'flsh'.*auto, flash_attn, flex, reference, sdpa.*, triton"
    ):
        registry.resolve("attention", "flsh", PLAIN, CPU)


@pytest.mark.parametrize(
    "here, changes, reason",
    [
        (CPU, {}, "a CPU has no float8 units"),
        (A100, {}, "(sm80) has no float8 units"),
        (
            Platform("amd", "gfx90a", "MI250X", 1 << 36),
            {},
            "(gfx90a) has no float8 units; those of AMD begin with gfx942",
        ),
        (
            Platform("nvidia", "sm100", "B200", 1 << 36),
            {},
            "no row of sm100's tuning table serves attention.float8_forward",
        ),
        (H200, {"softcap": 30.0}, "attention in float8 has no softcap"),
        (H200, {"sinks": True}, "attention in float8 has no sinks"),
        (H200, {"head_dim": 96}, "attention in float8 takes head_dim 64 or 128, not 96"),
        (H200, {"dtype": "float32"}, "bfloat16 or float16, not float32; use precision amp_bf16"),
        (H200, {"lower_right": True}, "attention in float8 is called with whole sequences"),
        (H200, {"sliding_window": 512, "alibi_max_bias": 8.0, "documents": True, "n_kv_heads": 4}, None),
        (MI300X, {}, None),
        (Platform("amd", "gfx950", "MI355X", 1 << 36), {}, None),
    ],
)
def test_attention_in_float8_is_taken_by_its_name_alone(here, changes, reason):
    found = registry.refusal("attention", "triton_float8", spec(**changes), here)
    assert (found is None) == (reason is None) and (reason or "") in (found or "")
    assert registry.resolve("attention", "auto", spec(), H200).name != "triton_float8"
    assert registry.saved_ops("attention", "triton") == {"llmtrain.attention_forward.default", registry._SUFFIX}


def test_table_has_every_backend_once():
    rows = registry.table("attention", spec(alibi_max_bias=8.0), H200)
    assert {r.backend: r.reason is None for r in rows} == {
        "reference": True,
        "sdpa:flash": False,
        "sdpa:cudnn": False,
        "sdpa:efficient": True,
        "sdpa:cpu": False,
        "flex": True,
        "varlen": False,
        "triton": True,
        "triton_float8": True,
        "flash_attn": False,
        "sdpa:flash3": False,
        "sdpa:flash4": False,
    }


SPECS: dict[registry.Operation, registry.Spec] = {
    "attention": PLAIN,
    "ssd": SSDSpec(8, 64, 64, 1, 256),
    "conv1d": Conv1dSpec(64, 4),
    "gated_norm": GatedNormSpec(64, 1, 1e-5),
    "rotary": RotarySpec(64),
    "norm": NormSpec(64),
    "mamba_mixer": MambaMixerSpec(Conv1dSpec(640, 4), SSDSpec(8, 64, 64, 1, 256), GatedNormSpec(512, 1, 1e-5)),
    "gated_delta": GatedDeltaSpec(8, 4, 64, 128),
    "kimi_delta": KimiDeltaSpec(4, 4, 64, 128),
    "mamba3": Mamba3Spec(8, 64, 64, 1, 16),
    "experts": ExpertsSpec(64, 48, 8, 2),
    "attention_step": PLAIN,
    "ssd_step": SSDSpec(8, 64, 64, 1, 256),
    "conv1d_step": Conv1dSpec(64, 4),
    "mamba3_step": Mamba3Spec(8, 64, 64, 1, 16),
}


@pytest.mark.parametrize("where", [CPU, H200, A100, MI300X])
def test_every_operation_serves_everywhere(where):
    assert registry.resolve("ssd", "auto", SPECS["ssd"], where).name == ("reference" if where is CPU else "triton")
    assert registry.resolve("conv1d", "auto", SPECS["conv1d"], where).name == {"cpu": "aten", "sm90": "triton"}.get(
        where.arch, "reference"
    )
    for operation in registry.OPERATIONS:
        reasons = {row.backend: row.reason for row in registry.table(operation, SPECS[operation], where)}
        assert reasons["reference"] is None


@pytest.mark.parametrize(
    "name, where, expected",
    [
        ("triton", H200, "triton"),
        ("triton", CPU, "aten"),  # cannot serve: what auto means
        ("reference", CPU, "reference"),
        ("mamba_ssm", H200, "reference"),  # not ours, even where auto would take it
        ("auto", H200, "triton"),
        ("auto", A100, "reference"),
    ],
)
def test_a_convolution_takes_the_backend_of_the_scan_beside_it_where_it_has_one(name, where, expected):
    assert registry.resolve_beside("conv1d", name, SPECS["conv1d"], where).name == expected


def test_a_convolution_over_documents_is_not_that_of_aten():
    packed = Conv1dSpec(64, 4, documents=True)
    assert registry.resolve_beside("conv1d", "auto", packed, CPU).name == "reference"
    reason = registry.refusal("conv1d", "aten", packed, CPU)
    assert reason is not None and "keeps no documents apart" in reason


@pytest.mark.parametrize(
    "spec, where, expected",
    [
        (NormSpec(4096), H200, "triton"),
        (NormSpec(2560, "layernorm", True), H200, "triton"),
        (NormSpec(8192), H200, "triton"),
        (NormSpec(6144, "layernorm"), H200, "triton"),
        (NormSpec(4096, "layernorm"), H200, "reference"),  # measured: slower, as the next three
        (NormSpec(8192, "layernorm"), H200, "reference"),
        (NormSpec(1024), H200, "reference"),
        (NormSpec(768), H200, "reference"),
        (NormSpec(3584, "layernorm"), H200, "reference"),  # between widths of which one is slower
        (NormSpec(2048, dtype="float16"), H200, "reference"),
        (NormSpec(2048, dtype="float32"), H200, "reference"),
        (NormSpec(2048), A100, "reference"),
        (NormSpec(2048), MI300X, "reference"),
        (NormSpec(2048), CPU, "reference"),
    ],
)
def test_a_norm_is_ours_between_the_sizes_where_that_was_measured_to_be_faster(spec, where, expected):
    assert registry.resolve("norm", "auto", spec, where).name == expected


@pytest.mark.parametrize("operation", ["ssd", "attention_step", "ssd_step", "conv1d_step"])
def test_a_scan_and_a_step_run_in_triton_on_gpus_and_by_the_reference_elsewhere(operation):
    wanted = SPECS[operation]
    chosen_by = {where.vendor: registry.resolve(operation, "auto", wanted, where).name for where in (H200, MI300X, CPU)}
    assert chosen_by == {"nvidia": "triton", "amd": "triton", "cpu": "reference"}
    double = type(wanted)(**{**vars(wanted), "dtype": "float64"})
    assert registry.resolve(operation, "auto", double, H200).name == "reference"
    with pytest.raises(ValueError, match="Triton kernels need a GPU"):
        registry.resolve(operation, "triton", wanted, CPU)


@pytest.mark.parametrize(
    ("operation", "spec", "words"),
    [
        ("attention_step", spec(head_dim=12), "multiple of 8 up to 256, not 12"),
        ("attention_step", spec(head_dim=264), "multiple of 8 up to 256, not 264"),
        ("ssd", SSDSpec(8, 256, 64, 1, 256), "head_dim up to 128, not 256"),
        ("ssd", SSDSpec(8, 64, 512, 1, 256), "d_state up to 256, not 512"),
        ("conv1d", Conv1dSpec(64, 5), "width up to 4, not 5"),
        ("norm", NormSpec(9216), "up to 8192 channels, not 9216"),
        ("gated_norm", GatedNormSpec(16384, 1, 1e-5), "groups of up to 8192 channels, not 16384"),
        ("gated_norm", GatedNormSpec(16384, 2, 1e-5), None),
        ("gated_delta", GatedDeltaSpec(4, 2, 64, 64, "float32"), "bfloat16 or float16, not float32"),
        ("gated_delta", GatedDeltaSpec(4, 2, 320, 64), "key_head_dim up to 256, not 320"),
        ("kimi_delta", KimiDeltaSpec(4, 4, 64, 64, "float32"), "bfloat16 or float16, not float32"),
        ("kimi_delta", KimiDeltaSpec(4, 4, 136, 64), "key_head_dim up to 128, not 136"),
        ("mamba3", Mamba3Spec(4, 129, 128, 1, 32), "head_dim up to 128, not 129"),
        ("mamba3", Mamba3Spec(4, 64, 258, 1, 32), "d_state up to 256, not 258"),
    ],
)
def test_sizes_and_dtypes_that_our_kernels_do_not_take_are_refused_on_every_machine(operation, spec, words):
    reason = registry.refusal(operation, "triton", spec, None)
    assert reason is None if words is None else reason is not None and words in reason


def test_without_a_row_of_the_tuning_table_our_kernel_is_refused():
    reason = registry.refusal("rotary", "triton", RotarySpec(512), H200)
    assert reason is not None
    assert "no row of sm90's tuning table serves rotary in bfloat16 at head_dim 512" in reason


def test_choosing_needs_no_torch():
    program = (
        "from llmtrain.kernels import platform, registry\n"
        "from llmtrain.kernels.attention.spec import AttentionSpec\n"
        "from llmtrain.models import backends\n"
        "assert registry.resolve('attention', 'auto', AttentionSpec(2, 2, 16, 0.25), platform.cpu()).name\n"
    )
    assert "torch" not in modules_after(program)


@pytest.mark.parametrize("here", [CPU, H200, A100], ids=["cpu", "H200", "A100"])
@pytest.mark.parametrize("sizes", [(128, 128), (256, 512), (24, 20), (257, 64)])
def test_segments_of_gated_deltanet_are_read_by_the_backend_that_reads_whole_sequences(here, sizes):
    """`check`, `describe` and `doctor` name one backend for both: the width of values decides nothing."""
    spec = GatedDeltaSpec(4, 2, *sizes)
    for name in ("triton", "fla"):
        assert registry.refusal("gated_delta", name, spec, here) == registry.refusal(
            "gated_delta", name, with_transition(spec), here
        )
    chosen = (registry.resolve("gated_delta", "auto", one, here).name for one in (spec, with_transition(spec)))
    assert len(set(chosen)) == 1
