"""`llmtrain check`: a good config gets one line, a bad one a clear message per mistake and exit code 2."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from llmtrain.cli import main
from llmtrain.errors import UserError
from llmtrain.schema.load import check_for_world, load_config
from tests.support.processes import modules_after
from tests.support.project import seconds_of_children

GOOD = """\
name: tiny
model:
  vocab_size: 512
  d_model: 128
  max_seq_len: 256
  blocks:
    m: {type: mamba2, d_state: 16, head_dim: 32}
    a: {type: attention, n_heads: 4, position: {type: alibi}, mlp: {type: gelu, d_ff: 256}}
  layers: m*2 (m a)*2
data:
  seq_len: 256
  prepare: {sources: [stdlib], out: shards, vocab_size: 512, seq_len: "${data.seq_len}"}
train:
  duration: 300 steps
  global_batch_size: 64
  microbatch_size: 8
optimizer:
  lr: 1e-3
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """check(text, *arguments) -> (exit code, what a user sees), in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *arguments: str) -> tuple[int, str]:
        Path("run.yaml").write_text(text)
        status = main(["check", "run.yaml", *arguments])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_good_config_gets_one_line_with_layers_and_steps(check):
    status, text = check(GOOD)
    assert status == 0
    assert text == (
        "run.yaml: OK, 6 layers (4 mamba2, 2 attention), d_model 128; 300 steps of 64 sequences x 256 tokens\n"
    )


def test_ranks_add_the_microbatches_of_each(check):
    status, text = check(GOOD, "--nproc", "4")
    assert status == 0
    assert "on 4 ranks 2 microbatches of 8" in text


def test_tokens_are_shown_as_steps(check):
    _, text = check(GOOD, "train.duration=1e6 tokens")
    assert "; 62 steps of" in text  # 1e6 / (64 * 256) = 61.04, rounded up


# By name: text of GOOD, what stands there instead, path, line and message to expect.
MISTAKES = yaml.safe_load((Path(__file__).parents[1] / "data/mistakes.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_gets_one_message(check, mistake):
    right, wrong, path, line, message = MISTAKES[mistake]
    assert GOOD.count(right) == 1, "the mistake must change the good config in one place"
    status, text = check(GOOD.replace(right, wrong))
    assert status == 2
    title, *rows = text.splitlines()
    assert title == "run.yaml: 1 error"
    assert len(rows) == 1
    assert rows[0].startswith(f"  {path}  line {line}  ")
    assert message in rows[0]


def test_batch_that_the_ranks_cannot_share(check):
    status, text = check(GOOD, "--nproc", "3")
    assert status == 2
    assert (
        "train.global_batch_size  line 15  64: must be a multiple of 24 (3 ranks x microbatch_size 8); use 48 or 72, or 63 or "
        "66 with train.microbatch_size=1" in text
    )


@pytest.mark.parametrize(
    ("batch", "microbatch", "ranks", "remedy"),
    [
        (2048, 4, 2048, "use 8192, or train.microbatch_size=1, which keeps it"),
        (8192, 16, 2048, "use 32768, or train.microbatch_size=4, which keeps it"),
        (96, 8, 8, "use 64 or 128, or train.microbatch_size=6, which keeps it"),
        (512, 16, 2048, "use 32768, or 2048 with train.microbatch_size=1"),
        (10, 1, 4, "use 8 or 12"),
        (24, 1, 9, "use 18 or 27"),
    ],
)
def test_a_remedy_for_the_batch_keeps_it_where_smaller_microbatches_can(batch, microbatch, ranks, remedy):
    config = load_config(
        "pretrain/mpt-1b", [f"train.{name}" for name in (f"global_batch_size={batch}", f"microbatch_size={microbatch}")]
    )
    [problem] = check_for_world(config, ranks)
    assert problem.message.endswith(f"; {remedy}")
    with pytest.raises(UserError, match=f"; {remedy}$"):
        config.grad_accum(ranks)


def test_a_warmup_that_rounds_to_nothing_is_refused_where_the_rate_hangs_on_it(check):
    status, text = check(GOOD, "schedule={type: inverse_sqrt, warmup: 0.1 %}")
    assert status == 2
    assert "schedule.warmup  override  '0.1 %': is less than one of 300 steps; inverse_sqrt needs one or more" in text


def test_lengths_in_epochs_are_checked_where_the_data_is(check, shards):
    text = GOOD.replace("max_seq_len: 256", "max_seq_len: 32").replace("seq_len: 256", "seq_len: 32")
    text = text.replace(
        '  prepare: {sources: [stdlib], out: shards, vocab_size: 512, seq_len: "${data.seq_len}"}\n',
        f"  train: {{streams: {{text: {{local: {shards}, split: train}}}}}}\n",
    )
    batch = ["train.global_batch_size=8", "train.duration=2 epochs"]
    status, report = check(text, *batch, "schedule.warmup=33 steps")  # an epoch has 16
    assert status == 2
    assert "'33 steps': the warmup is longer than train.duration (2 epochs): 33 steps of 32" in report
    assert check(text, *batch, "schedule.warmup=32 steps")[0] == 0


def test_what_is_wrong_with_the_norm_hides_nothing_of_the_blocks(check):
    text = GOOD.replace("n_heads: 4,", "n_heads: 4, backend: sdpa:flash,").replace(
        "  blocks:", "  norm: {eps: -1}\n  blocks:"
    )
    code, report = check(text)
    assert code == 2 and "2 errors" in report
    assert "model.norm.eps" in report and "model.blocks.a.backend" in report


def test_sharding_groups_that_do_not_fit_the_ranks(check):
    status, text = check(GOOD, "train.sharding={strategy: hybrid, shard_size: 3}", "--nproc", "4")
    assert status == 2
    assert "train.sharding.shard_size  override  3: must divide the number of ranks (4)" in text


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file(check):
    bad = GOOD.replace("d_state", "d_stat").replace("n_heads: 4", "n_heads: 5").replace("lr: 1e-3", "lr: fast")
    bad = bad.replace("name: tiny", "name: a b").replace("microbatch_size: 8", "microbatch_size: 7")
    status, text = check(bad, "train.precison=fp32")
    assert status == 2
    title, *rows = text.splitlines()
    assert title == "run.yaml: 6 errors"
    assert [row.split()[0] for row in rows] == [
        "name",
        "model.blocks.m.d_stat",
        "model.blocks.a.n_heads",
        "train.microbatch_size",
        "optimizer.lr",
        "train.precison",
    ]
    assert {
        row.index(place)
        for row, place in zip(rows, ["line 1", "line 7", "line 8", "line 16", "line 18", "override"], strict=True)
    } == {len("  model.blocks.a.n_heads  ")}
    assert rows[-1].endswith("override  unknown key; did you mean precision?")


# One override on the good config, then the path and the message to expect.
REFUSED = {
    "number from a name": ("optimizer.lr=${${name}}", "optimizer.lr", "there is no 'tiny' to refer to"),
    "section from a name": ("optimizer=${${name}}", "optimizer", "there is no 'tiny' to refer to"),
    "width from a name": ("model.d_model=${model.${name}}", "model.d_model", "there is no 'model.tiny' to refer to"),
    "half an interpolation": ("model.layers=${model", "model.layers", "cannot be resolved"),
    "text where a number belongs": ("optimizer.lr=a${optimizer.lr}", "optimizer.lr", "recursive interpolation"),
    "unknown resolver": ("name=${x:y}", "name", "unsupported interpolation type x"),
    "endless duration": ("train.duration=1e400 tokens", "train.duration", "expected at most 1e+18 tokens"),
    "date": ("seed=!!timestamp 2001-01-01", "seed", "the tag !!timestamp is not one for this value"),
    "alias loop": ("model.blocks=&a [*a]", "model.blocks", "an alias (*) to a value that contains it"),
    "deep override": ("seed=" + "[" * 500, "seed", "more than 32 mappings and lists inside one another"),
    "2,000 parentheses": ("model.layers=" + "(" * 2000 + "m" + ")" * 2000, "model.layers", "more than 20 groups"),
    "10^400 layers": ("model.layers=m*1" + "0" * 400, "model.layers", "more than 10000 layers"),
    "name of 50,000 characters": ("name=" + "x" * 50_000, "name", "has 50000 characters; at most 32768"),
    "name longer than a folder's": ("name=" + "x" * 150, "name", "use at most 100 characters"),
    "integer of 10^400": ("seed=1" + "0" * 400, "seed", "an integer lies below 2^63"),
    "integer of 10^5000": ("seed=1" + "0" * 5000, "seed", "an integer lies below 2^63"),
    "huge index": ("data.prepare.sources[99999999999999999999]=x", "data.prepare.sources", "there is no such entry"),
    "digit that is none": ("data.prepare.sources.\u00b2=x", "data.prepare.sources", "there is no such entry"),
    "negative seed": ("data.shuffle_seed=-1", "data.shuffle_seed", "an integer at least 0 and below 2147483648"),
    "vocabulary of 10^12": ("model.vocab_size=1000000000000", "model.vocab_size", "at most 16777216"),
    "rank of 2^63": ("model.blocks.a.n_heads=9223372036854775808", "model.blocks.a.n_heads", "lies below 2^63"),
    "rank of 2^40": ("model.blocks.a.n_heads=1099511627776", "model.blocks.a.n_heads", "at most 131072"),
    "project with a slash": ("logging.wandb.project=a/b", "logging.wandb.project", "takes no '/' in a name"),
    "empty tag": ("logging.wandb.tags=['']", "logging.wandb.tags.0", "tags of 1 to 64 characters"),
    "folder of nobody": ("run_dir=~nobody-here/runs", "run_dir", "there is no home folder of ~nobody-here"),
    "no folder": ("run_dir=''", "run_dir", "names no file or folder"),
    "half a character": ('eval.prompt="\\ud800"', "eval.prompt", "which is not text"),
    "as good as zero": ("optimizer.eps=1e-300", "optimizer.eps", "is as good as 0 in fp32"),
    "run among the shards": ("run_dir=shards/run", "run_dir", "is in a folder of shards (data.prepare.out: shards)"),
    "run among a stream's shards": (
        "data.train={streams: {a: {local: data, split: train, remote: 's3://b/c'}, b: {local: runs, remote: 's3://b/d'}}}",
        "run_dir",
        "is in a folder of shards (data.train.streams.b.local: runs)",
    ),
    "run in a link to nothing": ("run_dir=gone", "run_dir", "is a link to nowhere, which does not exist"),
    "source of an unknown kind": (
        "data.prepare.sources=['ftp://x/y']",
        "data.prepare.sources.0",
        "give s3:// or hf://",
    ),
    "source without a place": ("data.prepare.sources=['s3://']", "data.prepare.sources.0", "names no place"),
    "sources that are not there": ("data.prepare.sources=[nowhere]", "data.prepare.sources.0", "No such file"),
    "source without text": ("data.prepare.sources=[empty]", "data.prepare.sources.0", "holds no text"),
    "too little text": ("data.prepare.max_bytes=1000", "data.prepare.max_bytes", "1000 bytes of text are too few"),
    "out is a file": ("data.prepare.out=run.yaml", "data.prepare.out", "is a file, not a folder"),
    "out inside a source": (
        "data.prepare={sources: [texts], out: texts/x, vocab_size: 512, seq_len: 256}",
        "data.prepare.out",
        "lies inside the source texts",
    ),
    "out of another program": ("data.prepare.out=texts", "data.prepare.out", "was not made by `llmtrain prepare`"),
    "out of other settings": ("data.prepare.out=made", "data.prepare.vocab_size", "was made with 300"),
    "remote that is not there": (
        "data.train={streams: {a: {local: cache, remote: nowhere}}}",
        "data.train.streams.a.remote",
        "nowhere holds no index.json",
    ),
    "remote of an unknown kind": (
        "data.train={streams: {a: {local: cache, remote: 'ftp://x/y'}}}",
        "data.train.streams.a.remote",
        "StreamingDataset reads s3, gs",
    ),
    "no tokenizer": (
        "data.prepare={sources: [stdlib], out: s, tokenizer: ./nope, seq_len: 256}",
        "data.prepare.tokenizer",
        "there is no such file or folder",
    ),
    "broken tokenizer": (
        "data.prepare={sources: [stdlib], out: s, tokenizer: run.yaml, seq_len: 256}",
        "data.prepare.tokenizer",
        "is not a tokenizer",
    ),
    "tokenizer that is too large": (
        "data.prepare={sources: [stdlib], out: s, tokenizer: big.json, seq_len: 256}",
        "data.prepare.tokenizer",
        "has 900 tokens, more than model.vocab_size (512)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_fail_later_is_refused_by_name(check, case):
    for folder in ("empty", "texts", "made"):
        Path(folder).mkdir()
    Path("gone").symlink_to("nowhere")
    Path("texts/a.txt").write_text("word " * 20_000)
    Path("made/manifest.json").write_text('{"inputs": {"vocab_size": 300, "seq_len": 256, "compression": "none"}}')
    Path("big.json").write_text(json.dumps({"model": {"vocab": {f"t{i}": i for i in range(900)}}}))
    override, path, message = REFUSED[case]
    start = time.process_time()
    status, text = check(GOOD, override)
    assert time.process_time() - start < 1
    assert status == 2
    title, row = text.splitlines()
    assert title == "run.yaml: 1 error"
    assert row.startswith(f"  {path}") and message in row
    assert len(row) < 400


BOMBS = {
    "aliases": "a: &a [x, x, x]\n"
    + "".join(f"{c}: &{c} [{f'*{b}, ' * 9}]\n" for b, c in itertools.pairwise("abcdefghij")),
    "merge keys": "a: &a {x: 1}\n"
    + "".join(f"{c}: &{c} {{<<: [{f'*{b}, ' * 9}]}}\n" for b, c in itertools.pairwise("abcdefghij")),
    "values": "a: [" + "x, " * 20_000 + "]\n",
    "depth": "a: " + "[" * 500 + "]" * 500 + "\n",
    "length": "# " + "x" * 300_000 + "\n",
}


@pytest.mark.parametrize("case", BOMBS)
def test_text_that_would_exhaust_the_machine_is_refused_at_once(check, case):
    start = time.process_time()
    status, text = check(GOOD + BOMBS[case])
    assert time.process_time() - start < 2
    assert status == 2 and len(text.splitlines()) == 1
    assert "more than" in text


def test_interpolations_that_would_exhaust_the_machine_are_refused_at_once(check):
    lines = "".join(
        f"{b}: ['${{{a}}}', '${{{a}}}', '${{{a}}}', '${{{a}}}']\n" for a, b in itertools.pairwise("abcdefghijklm")
    )
    start = time.process_time()
    status, text = check(GOOD + "a: x\n" + lines)
    assert time.process_time() - start < 2
    assert status == 2 and "the interpolations make more than 10000 values" in text


@pytest.mark.parametrize(
    ("kind", "last"),
    {
        "as a text": "c: '\\${b12}${b12}'\n",
        "by a name that is computed": "n: b12\nc: '${${n}}'\n",
        "through a resolver": "c: '${oc.decode:${b12}}'\n",
    }.items(),
)
def test_references_are_followed_once_wherever_they_stand(check, kind, last):
    lines = "".join(f"b{i}: '${{b{i - 1}}}${{b{i - 1}}}'\n" for i in range(1, 13))
    start = time.process_time()
    status, text = check(GOOD + "b0: x\n" + lines + last)
    assert time.process_time() - start < 2, kind
    assert status == 2 and "interpolations" not in text and "cannot be resolved" not in text


def test_an_override_of_an_alias_leaves_the_other_uses_alone(check):
    text = GOOD.replace("m: {type", "m: &m {type").replace("  layers: m*2 (m a)*2", "    n: *m\n  layers: m n a")
    status, report = check(text, "model.blocks.n.head_dim=48")
    assert status == 2 and "model.blocks.n.head_dim" in report and "blocks.m." not in report


def test_the_quickstart_is_checked_in_half_a_second(tmp_path):
    """0.5 s of CPU time on a quiet machine; twice as much where others take the core's caches and clock."""
    took = []
    while len(took) < 4 and min(took, default=9.0) >= 0.7:
        done, seconds = run_cli("check", "quickstart", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        took.append(seconds)
    assert min(took) < 1.0, took


def test_the_quickstart_is_checked_by_few_libraries(tmp_path):
    """What they cost together is the half second; the models of tuning tables alone would be a tenth."""
    modules = modules_after("from llmtrain.cli import main; assert main(['check', 'quickstart']) == 0", cwd=tmp_path)
    others = {name.partition(".")[0] for name in modules if not name.startswith("_")} - sys.stdlib_module_names
    assert others <= {
        *("llmtrain", "yaml", "xxhash", "zstandard", "cython_runtime"),
        *("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"),
    }
    assert "llmtrain.kernels.registry" in modules and "llmtrain.kernels.tuning_table" not in modules
    assert not {"asyncio", "multiprocessing", "sqlite3", "unittest", "xml.etree"} & set(modules)


NOT_A_CONFIG = {
    "syntax": (GOOD.replace("train:\n", "train: {\n"), "run.yaml: line 15, column"),
    "tab": (GOOD.replace("  lr", "\tlr"), "indent with spaces, not tabs"),
    "empty": ("# nothing yet\n", "run.yaml: is empty; it needs name, model, data, train, optimizer"),
    "list": ("- name: x\n", "run.yaml: is not a mapping"),
    "two documents": (GOOD + "---\nname: x\n", "expected a single document"),
    "control character": ("name: \x07\n", "run.yaml: line 1: YAML does not allow the character '\\x07'"),
    "alias to itself": ("name: &a [*a]\n", "an alias (*) to a value that contains it"),
    "python object": ("name: !!python/name:os.system x\n", "line 1, column 7: the tag !!python/name:os.system"),
}


@pytest.mark.parametrize("case", NOT_A_CONFIG)
def test_file_that_holds_no_config(check, case):
    content, message = NOT_A_CONFIG[case]
    status, text = check(content)
    assert status == 2
    assert len(text.splitlines()) == 1
    assert message in text


def test_missing_file_names_the_nearest_one(check, tmp_path, capsys):
    check(GOOD)
    assert main(["check", "rnu.yaml"]) == 2
    assert capsys.readouterr().err == "rnu.yaml: no such file; did you mean run.yaml?\n"
    assert main(["check", "quite-other.yaml"]) == 2
    assert capsys.readouterr().err == "quite-other.yaml: no such file; . has run.yaml\n"
    assert main(["check", "no/run.yaml"]) == 2
    assert capsys.readouterr().err == "no/run.yaml: no such file; there is no folder no\n"
    assert main(["check", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: is a folder; {tmp_path} has {tmp_path / 'run.yaml'}\n"
    Path("gone.yaml").symlink_to("nowhere.yaml")
    assert main(["check", "gone.yaml"]) == 2
    assert capsys.readouterr().err == "gone.yaml: is a link to nowhere.yaml, which does not exist\n"


@pytest.mark.parametrize("verb", ["check", "train", "describe", "eval", "migrate"])
def test_a_pipe_or_device_is_no_config(tmp_path, monkeypatch, capsys, verb):
    """Neither waited for nor read: the pipe has no writer, and the file is read more than once."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("run.yaml")
    for name in ("run.yaml", "/dev/zero"):
        assert main([verb, name]) == 2
        assert capsys.readouterr().err == f"{name}: cannot be read: not a regular file\n"


def run_cli(*arguments: str, cwd: Path) -> tuple[subprocess.CompletedProcess, float]:
    start = seconds_of_children()
    done = subprocess.run([sys.executable, "-m", "llmtrain.cli", *arguments], cwd=cwd, capture_output=True, text=True)
    return done, seconds_of_children() - start


def test_command_reports_a_bad_file_and_exits_with_2(tmp_path):
    (tmp_path / "run.yaml").write_text(GOOD.replace("d_state", "d_stat"))
    done, seconds = run_cli("check", "run.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("run.yaml: 1 error\n  model.blocks.m.d_stat  line 7  unknown key; did you mean d_state?\n")
    assert seconds < 5
