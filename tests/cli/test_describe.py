"""`llmtrain describe` and `llmtrain mfu`, as a user types them."""

import json
import re
from pathlib import Path
from unittest.mock import patch

import pytest

from llmtrain.cli import main
from llmtrain.plan import meshes

PRETRAIN = Path(__file__).parents[2] / "yamls" / "pretrain"

# MPT: LLM Foundry, scripts/train/benchmarking/README.md. Llama and Zamba2: the released models' weights.
PUBLISHED = {
    "mpt-1b": 1_315_950_592,
    "mpt-7b": 6_658_859_008,
    "mpt-7b-alibi": 6_649_286_656,
    "mpt-30b": 29_975_214_080,
    "gpt-oss-20b": 20_914_757_184,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,  # without the 58 * 256 biases of its routers, which are no parameters here
    "glm4-9b": 9_400_279_040,
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "zamba2-1.2b": 1_215_064_704,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "olmo2-1b": 1_484_916_736,
    "olmo3-7b": 7_298_011_136,
    "olmo-hybrid-7b": 7_430_870_688,
    "phi3-mini": 3_821_079_552,
    "granite3-2b": 2_533_531_648,
    "pythia-1.4b": 1_414_647_808,
    "starcoder2-3b": 3_030_371_328,
    "gemma2-2b": 2_614_341_888,
    "gemma3-1b": 999_885_952,
    "granite4-h-350m": 340_332_224,
    "bamba-9b": 9_780_235_392,
    "falcon-h1-0.5b": 521_411_104,
    "apertus-8b": 8_053_338_176,
    "zaya1-8b": 8_840_488_784,
}


def facts(capsys, *argv: str) -> dict:
    assert main(["describe", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("path", sorted(PRETRAIN.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_pretraining_yaml_has_its_published_count_of_parameters_and_its_parts_add_up(capsys, path):
    found = facts(capsys, str(path))
    assert found["name"] == path.stem
    assert found["total_parameters"] == PUBLISHED.get(path.stem, found["total_parameters"])
    assert sum(part["parameters"] for part in found["components"]) == found["total_parameters"]
    active, total = found["active_parameters"], found["total_parameters"]
    assert active < total if "type: experts" in path.read_text() else active >= total
    assert sum(found["memory"].values()) == found["memory_total"]
    assert found["training_causal"] < found["training_foundry"]


@pytest.mark.parametrize(
    ("name", "architecture"),
    {
        "mpt-7b-alibi": "MptForCausalLM",
        "llama3-8b": "LlamaForCausalLM",
        "mamba2-370m": "Mamba2ForCausalLM",
        "zamba2-7b": "Zamba2ForCausalLM",
        "mpt-1b": None,
    }.items(),
)
def test_it_is_reported_before_training_whether_the_model_can_be_exported(capsys, name, architecture):
    path = str(PRETRAIN / f"{name}.yaml")
    found = facts(capsys, path)
    assert found["exports_as"] == architecture
    assert bool(found["not_exported"]) == (architecture is None)
    assert main(["describe", path]) == 0
    expected = architecture or "MptForCausalLM differs in model.positions, model.norm.bias, "
    assert expected in capsys.readouterr().out


def test_mpt_costs_what_llm_foundrys_formula_states(capsys):
    found = facts(capsys, str(PRETRAIN / "mpt-1b.yaml"))
    assert found["training_foundry"] == 6 * PUBLISHED["mpt-1b"] + 12 * 24 * 2048 * 2048


@pytest.mark.parametrize(("name", "copies", "uses"), [("zamba2-1.2b", 1, 6), ("zamba2-2.7b", 2, 9)])
def test_shared_blocks_are_stored_once_and_active_once_per_use(capsys, name, copies, uses):
    found = facts(capsys, str(PRETRAIN / f"{name}.yaml"))
    (shared,) = [part for part in found["components"] if part["name"] == "s: shared block"]
    assert (shared["copies"], shared["uses"]) == (copies, uses)
    more = (uses - copies) * shared["parameters"] // copies
    assert found["active_parameters"] - found["total_parameters"] == more


def test_expected_speed_and_length_of_the_run(capsys):
    """50 % of an H200 on MPT-1B: 0.5 * 989.5e12 / FLOP per token; 24,800 steps of 512 x 2048 tokens."""
    found = facts(capsys, str(PRETRAIN / "mpt-1b.yaml"), "--gpu", "h200", "--mfu", "0.5", "--world-size", "4")
    speed = found["speed"]
    assert speed["tokens_per_second_per_gpu"] == pytest.approx(0.5 * 989.5e12 / found["training_foundry"])
    assert found["tokens"] == 24_800 * 512 * 2048
    assert speed["days"] == pytest.approx(found["tokens"] / speed["tokens_per_second_per_gpu"] / 4 / 86_400)
    assert speed["seconds_per_step"] * 24_800 / 86_400 == pytest.approx(speed["days"])


def test_a_peak_of_ones_own_stands_for_a_gpu_that_is_not_in_the_table(capsys):
    path = str(PRETRAIN / "mpt-1b.yaml")
    own = facts(capsys, path, "train.peak_tflops=125", "--mfu", "0.4")["speed"]
    assert (own["peak_flops"], own["mfu"], own["peak_source"]) == (125e12, 0.4, "train.peak_tflops")
    instead = facts(capsys, path, "train.peak_tflops=125", "--mfu", "0.4", "--gpu", "h200")
    assert instead["speed"]["tokens_per_second_per_gpu"] == own["tokens_per_second_per_gpu"]
    assert instead["gpu_memory"] == 141e9
    assert main(["describe", path, "train.peak_tflops=125"]) == 0
    assert "50% MFU (foundry) of 125.0 TFLOP/s, one GPU (train.peak_tflops)" in capsys.readouterr().out


SMALL = """
name: small
run_dir: try/small
model:
  vocab_size: 64
  d_model: 8
  max_seq_len: 16
  blocks: {m: {type: mamba2, head_dim: 4, d_state: 4}, a: {type: attention, n_heads: 2}}
  layers: m a
data: {seq_len: 16, train: {streams: {s: {local: try/data, split: train}}}}
train: {duration: 1 steps, global_batch_size: 1, microbatch_size: 1}
optimizer: {lr: 1e-3}
"""


def test_small_numbers_have_units_that_show_them(capsys, tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    assert main(["describe", str(tmp_path / "small.yaml"), "--gpu", "h200"]) == 0
    out = capsys.readouterr().out
    assert not re.search(r"(?<![\d.,])0\.0+(?!\d)", out), out
    assert re.search(r"scan +256 FLOP +256 FLOP", out)
    assert re.search(r"together +[\d.]+ KiB +<1%", out)
    assert re.search(r"time on 1 GPU +[\d.]+ (µs|ns)", out)


def test_large_numbers_have_units_that_hold_them(capsys):
    path = str(PRETRAIN / "mpt-70b.yaml")
    assert main(["describe", path, "--gpu", "h200", "--world-size", "64"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"forward +1\d\d\.\d GFLOP", out) and re.search(r"together +[\d.]+ [GT]iB", out)
    assert re.search(r"time on 64 GPUs +[\d,.]+ days", out)


def test_overrides_change_what_is_described(capsys):
    path = str(PRETRAIN / "mpt-125m.yaml")
    plain, deep = facts(capsys, path), facts(capsys, path, "model.layers=attn*24", "train.duration=2 epochs")
    assert deep["n_layers"] == 2 * plain["n_layers"]
    assert (deep["steps"], deep["tokens"], deep["schedule"]) == (None, None, None)
    assert plain["schedule"].startswith("warmup to ") and f"at step {plain['steps']:,}" in plain["schedule"]


@pytest.mark.parametrize(
    "setting",
    [
        "blocks.attn.backend=sdpa:cudnn",
        "norm.backend=triton",
        "blocks.attn.norm={type: layernorm, bias: true, backend: triton}",
    ],
)
def test_a_backend_for_another_machine_can_still_be_described(capsys, setting):
    path = str(PRETRAIN / "mpt-125m.yaml")
    assert facts(capsys, path, f"model.{setting}")["total_parameters"] == facts(capsys, path)["total_parameters"]


@pytest.mark.parametrize("columns", [80, 100])
def test_tables_fit_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["describe", str(PRETRAIN / "zamba2-1.2b.yaml"), "--gpu", "mi300x", "--world-size", "8"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= columns
    for said in ("1,215,064,704", "m*5 (s+m m*5)*5 s+m m*2", "estimate", "tokens/s/GPU", "foundry", "causal"):
        assert said in out


def test_a_run_on_many_nodes_is_predicted_and_drawn(capsys, tmp_path):
    picture = tmp_path / "new folder" / "curve.png"
    found = facts(capsys, "pretrain/mpt-7b", "--nodes", "4", "--gpu", "mi300x", "--plot", str(picture))
    assert found["world_size"] == 32 and picture.stat().st_size > 5000
    points = {point["gpus"]: point for point in found["scaling"]}
    assert max(points) == 1024 and points[1]["kept"] == 1 > points[1024]["kept"]
    assert points[32]["memory"] == found["memory_total"]


def test_the_fastest_meshes_over_several_networks_are_found_and_drawn(capsys, tmp_path):
    picture = tmp_path / "links.png"
    given = ["pretrain/mpt-70b", "train.microbatch_size=1", "--nodes", "128", "--gpu", "h200"]
    with patch.multiple(meshes, STAGES=(1, 16), TENSOR=(2,)):
        found = facts(capsys, *given, "--link", "ndr,12.5,100", "--plot", str(picture))["links"]
        main(["describe", *given, "--link", "12.5,400"])
    assert picture.stat().st_size > 5000 and [one["link"] * 8 / 1e9 for one in found] == [12.5, 100, 400]
    slow, _, fast = (
        {name: one[name]["scale"]["tokens_per_second"] for name in ("without", "with_stages")} for one in found
    )
    assert slow["with_stages"] > 2 * slow["without"] and slow["without"] < fast["without"]
    assert found[0]["with_stages"]["mesh"].startswith("pipeline = 16 x tensor = 2")
    assert "Fastest meshes" in capsys.readouterr().out


def test_ranks_that_divide_experts_gather_less_and_receive_tokens(capsys):
    """Of 16 layers each GPU gathers 8 of 64 experts and gets 7 / 8 of the rows of 8 experts per token, there and back, in bf16."""
    alone = facts(capsys, "pretrain/olmoe-1b-7b", "--world-size", "8", "--gpu", "h200")
    found = facts(capsys, "pretrain/olmoe-1b-7b", "--world-size", "8", "--gpu", "h200", "train.parallel.expert=8")
    tokens = found["microbatch_size"] * 4096
    assert alone["routed"] == 0 and found["routed"] == 16 * 2 * 8 * 2048 * 2 * tokens * 7 / 8
    assert found["memory"]["weights"] < alone["memory"]["weights"]
    assert found["memory"]["optimizer"] == alone["memory"]["optimizer"]
    assert found["memory"]["activations"] > alone["memory"]["activations"]


@pytest.mark.parametrize(
    ("more", "least"),
    [
        ([], 1),
        (["train.parallel.tensor=2"], 2),
        (["train.parallel={context: 2, tensor: 4}"], 8),
        (["train.parallel.context=16"], 16),
        (["--gpus-per-node", "4", "train.sharding.strategy=hybrid"], 1),
        (["train.sharding.strategy=auto", "train.microbatch_size=auto"], 1),
        (["train.float8={}", "train.activation_checkpointing.type=full"], 1),
    ],
    ids=str,
)
def test_a_description_has_one_time_of_a_step_on_every_mesh(more, least, capsys):
    """Above the predictions and among them, with all that is computed of it; more GPUs that share samples exchange more."""
    found = facts(capsys, "pretrain/llama3-8b", "--nodes", "16", "--gpu", "h200", "train.global_batch_size=256", *more)
    [point] = [point for point in found["scaling"] if point["gpus"] == found["world_size"]]
    speed, gpus = found["speed"], found["world_size"]
    assert speed["seconds_per_step"] == point["step_seconds"] and found["memory_total"] == point["memory"]
    assert speed["tokens_per_second_per_gpu"] * gpus == pytest.approx(point["tokens_per_second"])
    assert speed["days"] * 86_400 == pytest.approx(found["steps"] * point["step_seconds"])
    assert point["sharding"] == found["sharding"]
    assert min(each["gpus"] for each in found["scaling"]) == least


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "2"], "--nodes needs --gpu NAME"),
        (["--nodes", "0", "--gpu", "h200"], "--nodes 0: expected 1 or more"),
        (["--nodes", "2", "--gpu", "h200", "--world-size", "3"], "--world-size has no effect with --nodes"),
        (["--plot", "x.png", "--gpu", "h200"], "--plot is of the prediction for --nodes N"),
        (["--link", "fast", "--gpu", "h200"], "--link is of the prediction for --nodes N"),
        (["--gpus-per-node", "0"], "--gpus-per-node is of the prediction for --nodes N"),
        (["--nodes", "2", "--gpu", "h200", "--link", "fast"], "--link takes Gbit/s per GPU"),
        (["--nodes", "2", "--gpu", "h200", "--link", "100,,ndr"], "--link takes Gbit/s per GPU"),
        (["--nodes", "2", "--gpu", "h200", "--node-link", "inf"], "above 0, and finite"),
        (["--nodes", "2", "--gpu", "h200", "--gpus-per-node", "0"], "above 0, and finite"),
        (["--plot", "x.pdf", "--nodes", "2", "--gpu", "h200"], "--plot x.pdf: expected the name of a .png or .svg"),
    ],
)
def test_predictions_that_lack_something_say_what(capsys, arguments, message):
    assert main(["describe", "pretrain/mpt-1b", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_curve_that_cannot_be_written_gives_the_reason(capsys, tmp_path):
    file = tmp_path / "file"
    file.touch()
    arguments = ["--nodes", "4", "--gpu", "h200", "--plot", str(file / "curve.svg")]
    assert main(["describe", "pretrain/mpt-7b", *arguments]) == 2
    assert f"cannot write {file}/curve.svg" in capsys.readouterr().err


def test_a_gpu_without_float8_units_is_reported_before_the_run_is_refused(capsys):
    for gpu, setting, said in (("a100", "{}", True), ("l4", "{}", False), ("a100", "{emulate: true}", False)):
        assert main(["describe", "pretrain/mpt-1b", "--gpu", gpu, f"train.float8={setting}"]) == 0
        assert ("NVIDIA A100 80GB has no float8 units: a run there is refused" in capsys.readouterr().out) == said


def test_layers_that_stay_in_bf16_are_named_with_the_reason(capsys):
    """Zamba2-2.7B uses shared blocks 9 times, with adapters that alone are small."""
    float8 = facts(capsys, "pretrain/zamba2-2.7b", "train.float8={}")["float8"]
    assert float8["left_out"] == [
        ["blocks.*.shared_input.mlp_adapter.down, 2560 -> 128", "small"],
        ["blocks.*.shared_input.mlp_adapter.up, 128 -> 20480", "small"],
    ]
    weights = facts(capsys, "pretrain/zamba2-2.7b")["forward_causal"]["projection"] / 2
    assert float8["share"] == pytest.approx(1 - 9 * (2560 + 20480) * 128 / weights)


def test_layers_that_are_left_out_of_some_alike_are_named_by_their_place(capsys):
    setting = "train.float8={exclude: ['blocks.1.*', 'blocks.3.mixer.wo', 'blocks.4.mixer.wo', 'blocks.5.mixer.wo']}"
    left_out = facts(capsys, "pretrain/llama3-8b", setting)["float8"]["left_out"]
    assert left_out == [
        ["blocks.1.mixer.wqkv, 4096 -> 6144", "train.float8.exclude"],
        ["blocks.1.mixer.wo, blocks.3.mixer.wo, blocks.4.mixer.wo and 1 more, 4096 -> 4096", "train.float8.exclude"],
        ["blocks.1.mlp.w_in, 4096 -> 28672", "train.float8.exclude"],
        ["blocks.1.mlp.w_out, 14336 -> 4096", "train.float8.exclude"],
        ["head, 4096 -> 128256", "the head"],
    ]


def test_a_pattern_of_layers_to_leave_out_that_matches_none_is_refused(capsys):
    assert main(["describe", "pretrain/mpt-1b", "train.float8={exclude: [blocks.*.mixer.in_proj]}"]) == 2
    assert "train.float8.exclude.0 = blocks.*.mixer.in_proj: matches no linear layer" in capsys.readouterr().err


def test_optimizer_state_in_host_memory_is_distinguished_from_the_gpus(capsys):
    offload = ["optimizer.offload=true", "train.microbatch_size=1", "train.activation_checkpointing.type=full"]
    assert main(["describe", "pretrain/mpt-1b", *offload]) == 0
    found = capsys.readouterr().out
    assert "optimizer (AdamW, in host memory)" in found
    assert "host memory of a rank" in found and "9.805 GiB" in found


def test_a_model_that_does_not_fit_reports_it(capsys):
    assert main(["describe", str(PRETRAIN / "mpt-70b.yaml"), "--gpu", "h200"]) == 0
    assert "more than the GPU has" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "7"], "must be a multiple of"),
        (["--world-size", "0"], "0 ranks"),
        (["--gpu", "v100"], "no peak is known for GPU 'v100'"),
        (["--gpu", "h200", "--mfu", "50"], "between 0 and 1"),
        (["--gpu", "v100"], "train.peak_tflops"),
        (["train.peak_tflops=9.895e14"], "train.peak_tflops"),
        (["train.peak_tflops=0"], "train.peak_tflops"),
        (["--mfu", "0.5"], "--mfu has no effect without --gpu or train.peak_tflops"),
        (["model.d_modl=3"], "d_model"),
    ],
)
def test_bad_requests_to_describe_exit_2_with_a_reason(capsys, arguments, message):
    assert main(["describe", str(PRETRAIN / "mpt-1b.yaml"), *arguments]) == 2
    assert message in capsys.readouterr().err


RUN_405B = ["mfu", "--params", "405e9", "--batch", "16", "--seq-len", "64", "--step-time", "30", "--gpus", "8"]


@pytest.mark.parametrize(("extra", "shown"), [([], "0.8 %"), (["--frozen"], "0.53 %")])
def test_mfu_of_a_public_405b_run(capsys, extra, shown):
    assert main([*RUN_405B, "--peak", "1.3e15", *extra]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("MFU")]
    assert line.split(maxsplit=1)[1] == shown


def test_mfu_with_the_attention_term_and_a_gpu_by_name(capsys):
    """LLM Foundry's MPT-1B on 8 H100s: 363,645 tokens/s, 41.82 % MFU."""
    figures = [
        "--params",
        "1315950592",
        "--batch",
        "112",
        "--seq-len",
        "2048",
        "--step-time",
        str(112 * 2048 / 363_645),
    ]
    assert main(["mfu", *figures, "--gpus", "8", "--gpu", "h100-sxm", "--layers", "24", "--d-model", "2048"]) == 0
    out = capsys.readouterr().out
    assert "6 N + 12 L d T" in out
    assert "MFU              41.8" in out


def test_more_than_the_peak_is_called_impossible(capsys):
    assert main([*RUN_405B, "--peak", "1e12"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("1036.8% is above 100 %") and "1 TFLOP/s (as given)" in line and "--gpus 8" in line
    assert main([*RUN_405B, "--peak", "1.3e15"]) == 0
    assert "above 100 %" not in capsys.readouterr().out


def test_recomputation_adds_hfu(capsys):
    assert main([*RUN_405B, "--peak", "1.3e15", "--recompute", "1"]) == 0
    assert "HFU              1.06 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--gpu", "h100"], "did you mean h100-sxm"),
        (["--gpu", "mi210", "--dtype", "fp8"], "has no peak for 'fp8'; it has bf16, fp16, fp32"),
        (["--peak", "0"], "--peak must be positive"),
        (["--peak", "1e15", "--dtype", "bf16"], "--dtype has no effect with --peak"),
        (["--peak", "1e15", "--layers", "24"], "--layers and --d-model go together"),
        (["--peak", "1e15", "--recompute", "2"], "between 0 and 1"),
        (["--peak", "1e15", "--step-time", "-3"], "--step-time must be positive and finite, not -3"),
        (["--peak", "1e15", "--step-time", "inf"], "--step-time must be positive and finite, not inf"),
    ],
)
def test_bad_figures_exit_2_with_a_reason(capsys, extra, message):
    assert main([*RUN_405B, *extra]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_peak_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit) as stop:
        main(RUN_405B)
    assert stop.value.code == 2
    assert "one of the arguments --peak --gpu is required" in capsys.readouterr().err


def test_the_command_for_mfu_in_the_readme_runs(capsys):
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    [line] = re.findall(r"`llmtrain (mfu [^`]*)`", text)
    assert main(line.split()) == 0 and "MFU" in capsys.readouterr().out
