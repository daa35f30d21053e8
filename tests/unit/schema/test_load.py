"""Reading a YAML: scalars, interpolation, overrides, and what is reported when something is wrong."""

import re
import sys

import pytest

from llmtrain.commands.checks import load_runnable
from llmtrain.config.report import ConfigError
from llmtrain.schema.load import load_config

GOOD = """\
name: tiny
model:
  vocab_size: 512
  d_model: 128
  max_seq_len: 256
  blocks:
    m: {type: mamba2, d_state: 16, head_dim: 32}
  layers: m*2
data:
  seq_len: 256
  train: {streams: {books: {local: books}}}
train:
  duration: 300 steps
  global_batch_size: 64
  microbatch_size: 8
optimizer:
  lr: 1e-3
"""


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "run.yaml"

    def run(text: str = GOOD, *overrides: str, load=load_config, **options):
        path.write_text(text)
        return load(path, overrides, **options)

    return run


def problems(read, *args, **options) -> dict[str, str]:
    """path -> message of everything that is wrong."""
    with pytest.raises(ConfigError) as caught:
        read(*args, **options)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_a_config_for_evaluation_is_reported_as_that(load):
    assert problems(load, "model: runs/a\ntasks: [piqa]\nconvention: foundry\n") == {
        "": "is a config for evaluation (it has tasks, convention); give one with model, data, train and optimizer, such as "
        "quickstart; this one is for `llmtrain eval`"
    }


# Values


@pytest.mark.parametrize(
    "text,value", [("1e-3", 1e-3), ("1", 1.0), ("0.5", 0.5), (".5", 0.5), ("3.", 3.0), ("2E-4", 2e-4)]
)
def test_numbers_in_any_notation(load, text, value):
    assert load(GOOD.replace("1e-3", text)).optimizer.lr == value


def test_integers_may_have_underscores(load):
    assert load(GOOD.replace("vocab_size: 512", "vocab_size: 32_000")).model.vocab_size == 32_000


def test_on_and_off_are_text_as_in_yaml_1_2(load):
    assert load(GOOD, "train.compile=on").train.compile == "on"


def test_pairs_are_lists_in_yaml(load):
    assert load(GOOD, "optimizer.betas=[0.8, 0.9]").optimizer.betas == (0.8, 0.9)


def test_anchors_and_merge_keys(load):
    text = GOOD.replace(
        "m: {type: mamba2, d_state: 16, head_dim: 32}",
        "m: &m {type: mamba2, d_state: 16, head_dim: 32}\n    n: {<<: *m, d_state: 8}",
    )
    blocks = load(text.replace("m*2", "m n")).model.blocks
    assert (blocks["m"].d_state, blocks["n"].d_state, blocks["n"].head_dim) == (16, 8, 32)


# Interpolation


def test_interpolation_keeps_the_type_of_what_it_refers_to(load):
    assert load(GOOD.replace("max_seq_len: 256", "max_seq_len: ${data.seq_len}")).model.max_seq_len == 256


def test_interpolation_sees_overrides(load):
    assert load(GOOD, "name=other").run_dir == "runs/other"


def test_interpolation_may_refer_to_a_default(load):
    assert load(GOOD.replace("  seq_len: 256\n", "").replace("256", "${data.seq_len}")).model.max_seq_len == 2048


def test_interpolation_of_the_environment(load, monkeypatch):
    monkeypatch.setenv("SHARDS", "/data/books")
    text = GOOD.replace("local: books", "local: '${oc.env:SHARDS}'")
    assert load(text).data.train_streams()["books"].local == "/data/books"


def test_a_number_of_the_environment_is_reported_how_to_become_one(load, monkeypatch):
    monkeypatch.setenv("RATE", "2e-3")
    with pytest.raises(ConfigError, match=re.escape("environment variable: ${oc.decode:${oc.env:NAME}}")):
        load(GOOD, "optimizer.lr=${oc.env:RATE}")
    assert load(GOOD, "optimizer.lr=${oc.decode:${oc.env:RATE}}").optimizer.lr == 2e-3


def test_one_dead_interpolation_is_reported_once_not_at_every_user(load):
    text = GOOD.replace("  seq_len: 256", "  seq_len: ${data.lenght}").replace(
        "max_seq_len: 256", "max_seq_len: ${data.seq_len}"
    )
    assert list(problems(load, text)) == ["data.seq_len"]


# Overrides


def test_overrides_apply_in_order(load):
    assert load(GOOD, "seed=1", "seed=2").seed == 2


def test_override_of_a_setting_the_file_does_not_have(load):
    config = load(GOOD, "logging.wandb.project=mine", "model.blocks.m.norm.eps=1e-6")
    assert config.logging.wandb.project == "mine"
    assert config.model.blocks["m"].norm.eps == 1e-6


def test_null_removes_a_named_entry(load):
    two = ["model.blocks.b={type: mamba2, d_state: 8, head_dim: 16}", "model.layers=b*2", "model.blocks.m=null"]
    assert set(load(GOOD, *two).model.blocks) == {"b"}
    with pytest.raises(ConfigError, match="no such entry; did you mean m"):
        load(GOOD, "model.blocks.mm=null")


def test_override_of_a_list_entry(load):
    text = GOOD + "  betas: [0.9, 0.95]\n"
    assert load(text, "optimizer.betas.1=0.99").optimizer.betas == (0.9, 0.99)
    assert load(text, "optimizer.betas[0]=0.5").optimizer.betas == (0.5, 0.95)


def test_override_takes_the_place_of_a_whole_section(load):
    config = load(GOOD, "model.blocks.m={type: attention, n_heads: 4}")
    assert config.model.blocks["m"].type == "attention"


def test_override_repairs_what_is_wrong_in_the_file(load):
    assert (
        load(GOOD.replace("d_state: 16", "d_state: ten"), "model.blocks.m.d_state=10").model.blocks["m"].d_state == 10
    )


@pytest.mark.parametrize(
    "override,path,message",
    [
        ("train.microbatch_sise=4", "train.microbatch_sise", "unknown key; did you mean microbatch_size?"),
        ("trian.seed=4", "trian", "unknown key; did you mean train?"),
        ("model.blocks.mm.d_state=8", "model.blocks.mm", "there is no such entry; did you mean m?"),
        ("model.blocks.zebra.d_state=8", "model.blocks.zebra", "there is no such entry; there are: m"),
        ("name.first=x", "name.first", "there is no such entry: name is not a mapping"),
        ("seed", "seed", "is not of the form a.b=value"),
        ("model..d_model=3", "model..d_model=3", "is not of the form a.b=value"),
        ("seed=[1", "seed", "is not a YAML value"),
        ("seed=ten", "seed", "expected an integer at least 0 and below 2147483648, found 'ten' (a string)"),
    ],
)
def test_bad_override(load, override, path, message):
    found = problems(load, GOOD, override)
    assert list(found) == [path]
    assert message in found[path]


def test_a_profile_after_the_last_step_is_a_problem(load):
    load(GOOD, "train.duration=6 steps", "train.profile={steps: 3, after: 3}")
    load(GOOD, "train.duration=1 epochs", "train.profile={steps: 3, after: 400}")
    found = problems(load, GOOD, "train.duration=6 steps", "train.profile={steps: 3, after: 4}")
    assert list(found) == ["train.profile.after"] and "the run has 6" in found["train.profile.after"]


def test_sequences_of_one_token_are_a_problem(load):
    found = problems(load, GOOD, "data.seq_len=1")
    assert list(found) == ["data.seq_len"] and "no token to predict" in found["data.seq_len"]
    load(GOOD, "data.seq_len=2")


# Reports


def test_rules_of_a_section_are_checked_although_another_entry_in_it_is_wrong(load):
    text = GOOD.replace("microbatch_size: 8", "microbatch_size: 7\n  nonfinite: halt").replace("m*2", "(m")
    text = text.replace("d_model: 128", "d_modl: 128")
    assert set(problems(load, text)) == {"train.microbatch_size", "train.nonfinite", "model.layers", "model.d_modl"}


def test_rules_that_need_a_wrong_entry_are_left_out(load):
    # 128 heads of ... cannot be judged without d_model, nor the batch without the microbatch.
    assert list(problems(load, GOOD.replace("d_model: 128", "d_model: wide"))) == ["model.d_model"]
    assert list(problems(load, GOOD.replace("microbatch_size: 8", "microbatch_size: few"), world_size=3)) == [
        "train.microbatch_size"
    ]


def test_settings_that_break_a_rule_are_not_judged_by_further_rules(load):
    text = GOOD.replace("300 steps", "5 %").replace("microbatch_size: 8", "microbatch_size: 7")
    assert list(problems(load, text, world_size=3)) == ["train.duration", "train.microbatch_size"]


def test_every_missing_key_is_named(load):
    assert list(problems(load, "name: x\n")) == ["model", "data", "train", "optimizer"]


def test_placeholder_must_be_filled_in(load):
    assert problems(load, GOOD.replace("1e-3", "???")) == {"optimizer.lr": "stands for a value that you have to give"}


def test_config_error_is_a_value_error_with_values_and_lines(load):
    with pytest.raises(ValueError, match=r"run.yaml: 1 error\n  train.microbatch_size  line 15  7: must divide"):
        load(GOOD.replace("microbatch_size: 8", "microbatch_size: 7"))


# Ranks and data


ATTENTION = "model.blocks.m={type: attention, n_heads: 4, backend: triton}"
EXPERTS = "model.blocks.m.mlp={type: experts, n_experts: 12, top_k: 2, d_ff: 64}"
BALANCED = "model.blocks.m.mlp={type: experts, n_experts: 2, top_k: 1, d_ff: 8, balance: {%s}}"
HYBRID = "train.sharding={strategy: hybrid, shard_size: %d}"
BATCH, SHARD = "train.global_batch_size", "train.sharding.shard_size"
# Settings beside those of GOOD, ranks, and the message: it is of the first setting, unless another is named.
RANKS = {
    ("train.parallel.context=4", 6): "must divide the number of ranks (6)",
    ("train.parallel.context=4", 12, BATCH): "3 groups of 4 ranks x microbatch_size 8",
    ("train.parallel.context=200", 200): "cuts data.seq_len = 256 into 400 parts",
    ("train.parallel.context=2", HYBRID % 3, 6): "must divide train.sharding.shard_size (3)",
    ("train.parallel.context=2", ATTENTION, "model.blocks.m.sliding_window=64", 2): "block m: attention backend 'triton'",
    ("train.parallel.tensor=2", 3): "must divide the number of ranks (3)",
    ("train.parallel={tensor: 2, context: 2}", 6): "between 4 ranks, which must divide",
    ("train.parallel.async_tensor=on", 2): "no effect with tensor: 1",
    ("train.parallel.async_tensor=on", "train.parallel.tensor=2", "train.compile=off", 2): "needs train.compile: auto or on",
    ("train.parallel.tensor=7", 7): "cannot divide vocab_size = ",
    ("optimizer.type=muon", "train.parallel.tensor=2", 2): "whole matrices",
    ("optimizer.type=adamw_8bit", "train.parallel.tensor=2", 2): "whole rows",
    ("train.float8={}", "train.parallel.tensor=2", "train.precision=amp_bf16", 2): "whole matrices",
    ("train.parallel.tensor=2", "train.parallel.context=2", HYBRID % 6, 12): "makes groups of 4 ranks",
    ("train.parallel.pipeline=3", 3): "more stages than the model has layers (2)",
    ("train.parallel.pipeline=2", 3): "must divide the number of ranks (3)",
    ("train.parallel.virtual_stages=2", 2): "no effect with train.parallel.pipeline: 1",
    ("train.parallel={pipeline: 2, tensor: 2}", 6): "between 4 ranks, which must divide",
    ("train.parallel.pipeline=2", "train.microbatch_size=64", 2, BATCH): "gives the pipeline 1 of the 2 microbatches (of 64) that "
    "its 2 stages need; use at least 128",
    ("train.parallel={pipeline: 2, context: 2}", HYBRID % 1, 4, SHARD): "must be a multiple of the 2 ranks of a stage",
    ("train.parallel.pipeline=2", HYBRID % 4, 4, SHARD): "must divide the number of ranks of a stage (2)",
    ("train.microbatch_size=auto", "train.parallel.pipeline=2", 2): "use a number",
    ("train.cuda_graphs=on", "train.parallel.pipeline=2", 2): "use auto or off",
    ("train.parallel.virtual_stages=2", "train.parallel.pipeline=2", 2): "4 parts of 2 layers; use at most 1",
    ("train.parallel.schedule=zero_bubble", "train.parallel.pipeline=2", 2): "use 1f1b",
    (
        "train.parallel={pipeline: 2, virtual_stages: 2}", "model.layers=m*4", "train.microbatch_size=16", f"{BATCH}=112", 2, BATCH,
    ): "cannot divide into 3 equal rounds; use 96 or 128, or train.parallel.virtual_stages: 1",
    (BALANCED % "over: model", "train.parallel.pipeline=2", 2, "model.blocks.m.mlp.balance.over"): "use layer",
    (BALANCED % "tokens: step", "train.parallel.pipeline=2", 2, "model.blocks.m.mlp.balance.tokens"): "use microbatch",
    ("train.parallel.expert=2", 2): "no block has an mlp of type experts; use 1",
    ("train.parallel.expert=8", EXPERTS, 8): "does not divide n_experts of block m (12)",
    ("train.parallel.expert=4", EXPERTS, 6): "must divide the number of ranks (6)",
    ("train.parallel.expert=3", "train.parallel.tensor=2", EXPERTS, 6): "must be a multiple of train.parallel.tensor (2), whose "
    "ranks send experts their own tokens; use 6",
    ("train.parallel.expert=4", HYBRID % 2, EXPERTS, 4): "must divide train.sharding.shard_size (2)",
    ("train.microbatch_size=auto", "train.parallel.expert=2", EXPERTS, 2): "use a number, or train.parallel.expert: 1",
    ("train.cuda_graphs=on", "train.parallel.expert=2", EXPERTS, 2): "numbers of tokens that ranks with different experts send",
    ("data.seq_len=250", "train.parallel={context: 2, tensor: 2, expert: 2}", EXPERTS, 4): "must be a multiple of 8 "
    "(train.parallel.context = 2 x tensor = 2 x expert = 2)",
}  # fmt: skip


@pytest.mark.parametrize(("given", "message"), RANKS.items())
def test_ranks_that_cannot_share_a_run_are_reported_why(load, given, message):
    [ranks] = (one for one in given if isinstance(one, int))
    settings, others = given[: given.index(ranks)], given[given.index(ranks) + 1 :]
    [path] = others or [settings[0].partition("=")[0]]
    assert message in problems(load, GOOD, *settings, world_size=ranks)[path]


def test_a_batch_too_small_for_one_pipeline_is_refused_for_any_number_of_ranks(load):
    found = problems(load, GOOD, "train.parallel.pipeline=2", "train.microbatch_size=64")
    assert "use at least 128" in found[BATCH]


def test_ranks_may_divide_experts_beside_sequences_and_layers(load):
    for parallel in ("{expert: 4}", "{context: 2, tensor: 2, expert: 4}", "{tensor: 2, expert: 2}"):
        assert load(GOOD, EXPERTS, f"train.parallel={parallel}", world_size=4).train.parallel.unit in (2, 4)
    uncounted = ["train.parallel={context: 2}", "data.seq_len=250", "model.blocks.m.mlp.balance.weight=0"]
    assert load(GOOD, EXPERTS, *uncounted, world_size=4).data.seq_len == 250


def test_ranks_may_share_the_sequences_of_every_type_of_block(load):
    for changes in ([], [ATTENTION], ["model.blocks.m={type: gated_deltanet, n_heads: 4}"]):
        assert load(GOOD, *changes, "train.parallel.context=2", world_size=8).train.parallel.context == 2


def test_groups_of_ranks_that_share_sequences_share_the_batch(load):
    config = load(GOOD, "train.parallel.context=4", world_size=32)
    assert config.grad_accum(32) == 1 and config.grad_accum(4) == 8


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (["train.float8={}"], "train.precision", "must be amp_bf16 for train.float8"),
        (
            ["train.precision=amp_bf16", "train.float8={recipe: rowwise, all_gather: true}"],
            "train.float8.all_gather",
            "needs recipe: tensorwise",
        ),
        (
            ["train.precision=amp_bf16", "train.float8={}", "data.seq_len=20", "train.microbatch_size=1"],
            "train.float8",
            "train.microbatch_size x data.seq_len is 20 on one rank",
        ),
        (
            ["train.precision=amp_bf16", "train.float8={exclude: ['*.inproj']}"],
            "train.float8.exclude.0",
            "matches no linear layer",
        ),
    ],
)
def test_float8_that_cannot_be_is_refused_before_anything_starts(load, overrides, path, message):
    assert message in problems(load, GOOD, *overrides, load=load_runnable)[path]


def test_float8_without_torchao_names_the_extra(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    found = problems(load, GOOD, "train.precision=amp_bf16", "train.float8={}", load=load_runnable)
    assert "pip install 'llmtrain[float8]'" in found["train.float8"]


def test_a_run_dir_that_cannot_be_one_is_reported_before_anything_starts(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    found = problems(load, GOOD, "run_dir=taken/run", load=load_runnable)["run_dir"]
    assert found == f"{tmp_path}/taken is a file, not a folder; choose another"
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path / "locked")
    assert "locked may not be written to" in problems(load, GOOD, "run_dir=locked/run", load=load_runnable)["run_dir"]
    assert "run_dir" not in problems(load, GOOD, "run_dir=new/run", load=load_runnable)


def test_the_home_folder_of_a_run_dir_is_the_user_s(load, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(GOOD, "run_dir=~/runs/${name}").run_dir == f"{tmp_path}/runs/tiny"
    assert load(GOOD, "run_dir=./~/runs").run_dir == "./~/runs"


@pytest.mark.parametrize(
    "remote", ["runs/tiny", "./runs/tiny/checkpoints", "file://{here}/runs/tiny/copy", "runs/../runs/tiny"]
)
def test_copies_of_a_run_are_not_kept_in_its_folder(load, remote, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = problems(load, GOOD, f"checkpoint.remote={remote.format(here=tmp_path)}")
    assert "is in run_dir" in found["checkpoint.remote"]
    load(GOOD, "checkpoint.remote=runs/tiny-copies")
