"""`llmtrain bench train`: the cases of a sweep, what is measured again, and the figures; runs are made up."""

import argparse
import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmtrain.bench.train import command
from llmtrain.bench.train.cases import Case, cases
from llmtrain.bench.train.command import as_csv, as_markdown
from llmtrain.bench.train.measure import figures
from llmtrain.bench.train.sweep import Sweep, load_sweep
from llmtrain.config.report import ConfigError
from tests.support.tiny import tiny_settings

SWEEP = "models: [pretrain/mpt-125m, pretrain/mamba2-130m]\nseq_lens: [512, 1024]\ngpus: [1, 2]\nprecisions: [bf16, rowwise]\n"


def sweep(tmp_path: Path, text: str = SWEEP) -> Sweep:
    file = tmp_path / "sweep.yaml"
    file.write_text(text, encoding="utf-8")
    return load_sweep(file)


def test_every_combination_is_a_case_with_its_settings(tmp_path):
    found = cases(sweep(tmp_path), tmp_path / "out")
    assert len({case.name for case in found}) == len(found) == 2 * 2 * 2 * 2
    for case in found:
        train = case.config.train
        assert case.config.data.seq_len == case.seq_len and train.precision == "amp_bf16"
        assert (train.float8 and train.float8.recipe) == (None if case.precision == "bf16" else "rowwise")
        assert case.config.data.prepare and case.config.data.prepare.seq_len == case.seq_len
        assert Path(case.config.run_dir) == tmp_path / "out" / "runs" / case.name


def test_the_batch_grows_with_the_gpus_where_it_is_given_per_gpu(tmp_path):
    text = SWEEP + "batch_tokens: 20_000\nsettings: [train.microbatch_size=4]\n"
    for case in cases(sweep(tmp_path, text), tmp_path):
        assert case.config.train.global_batch_size == case.gpus * 4 * (20_000 // (4 * case.seq_len))


def test_settings_go_before_those_of_the_yaml(tmp_path):
    [case] = cases(sweep(tmp_path, "models: [pretrain/mpt-1b]\nsettings: [train.microbatch_size=2]\n"), tmp_path)
    assert case.config.train.microbatch_size == 2 and case.seq_len == 2048


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("models: []\n", "models"),
        ("models: [pretrain/mpt-1b]\nprecisions: [fp16]\n", "precisions.0"),
        ("models: [pretrain/mpt-1b]\nsettings: [train.compile]\n", "settings.0"),
        ("models: [pretrain/mpt-1b]\nsteps: 0\n", "steps"),
    ],
)
def test_a_wrong_sweep_is_reported(tmp_path, text, path):
    with pytest.raises(ConfigError, match=path):
        sweep(tmp_path, text)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("train.precision=amp_bf16", "use precisions"),
        ("train.float8={}", "use precisions"),
        ("train.float8.small_products=true", "use precisions"),
        ("train.duration=9 steps", "use steps and warmup"),
        (" name = zzz", "rename the model's YAML"),
        ("run_dir=/tmp/x", "use --out"),
        ("data.seq_len=64", "use seq_lens"),
        ("data.train.streams=null", "leave it out"),
        ("data={seq_len: 64}", r"would replace data.train, .*data.seq_len, .*write data.KEY=VALUE"),
        ("schedule.type=cosine", "leave it out"),
        ("logging.interval=5", "leave it out"),
        ("train.global_batch_size=8", "use one of the two"),
    ],
)
def test_what_the_sweep_sets_is_refused_among_its_settings(tmp_path, setting, told):
    sizes = "batch_tokens: 4096\n" if "batch" in setting else ""
    key = setting.partition("=")[0].strip()
    with pytest.raises(ConfigError, match=rf"settings\.1 *line 2 +{key} .*{told}"):
        sweep(tmp_path, f"models: [mpt-125m]\nsettings: [train.compile=off, {json.dumps(setting)}]\n{sizes}")


@pytest.mark.parametrize(
    "text", ["seq_lens: [64, 128, 64]", "gpus: [1, 2, 1]", "precisions: [bf16, fp32, bf16]"], ids=lambda text: text[:4]
)
def test_equal_cases_are_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=rf"{text.partition(':')[0]}\.2 *line 2 .* is there twice"):
        sweep(tmp_path, f"models: [mpt-125m]\n{text}\n")


def test_a_model_that_is_named_twice_is_refused_by_whatever_names(tmp_path):
    with pytest.raises(ConfigError, match=r"models\.1 *line 1 *'pretrain/mpt-125m': is there twice"):
        cases(sweep(tmp_path, "models: [mpt-125m, pretrain/mpt-125m]\n"), tmp_path)


def test_a_batch_below_one_microbatch_is_refused(tmp_path):
    text = "models: [mpt-125m]\nseq_lens: [64]\ngpus: [2]\nbatch_tokens: 10\nsettings: [train.microbatch_size=2]\n"
    with pytest.raises(
        ConfigError, match=r"batch_tokens *line 4 *10: .* mpt-125m on 2 GPUs, 2 x 64 tokens; use at least 128"
    ):
        cases(sweep(tmp_path, text), tmp_path)
    [case] = cases(sweep(tmp_path, text.replace("10", "128")), tmp_path)
    assert case.config.train.global_batch_size == 4


def test_a_batch_that_is_rounded_is_reported(tmp_path, capsys):
    text = "models: [mpt-125m]\nseq_lens: [64, 100]\nbatch_tokens: 1280\nsettings: [train.microbatch_size=2]\n"
    bench(tmp_path, Runs(), text)
    told = [line for line in capsys.readouterr().out.splitlines() if "batch_tokens" in line]
    assert told == ["mpt-125m-100-1gpu-bf16: batch_tokens 1,280, in whole microbatches 1,200"]


def test_details_of_float8_and_sizes_of_batches_may_be_set(tmp_path):
    settings = "settings: [train.float8.small_products=true, train.microbatch_size=2, train.global_batch_size=6]\n"
    [case] = cases(sweep(tmp_path, f"models: [mpt-125m]\nprecisions: [rowwise]\n{settings}"), tmp_path)
    train = case.config.train
    assert train.float8 and train.float8.small_products and train.float8.recipe == "rowwise"
    assert (train.microbatch_size, train.global_batch_size) == (2, 6)


def test_a_case_that_cannot_be_is_reported_before_any_is_run_at_the_key_of_the_sweep(tmp_path):
    text = "models: [mpt-125m, mpt-1b]\ngpus: [1, 7]\nprecisions: [bf16, fp32]\n"
    with pytest.raises(ConfigError) as error:
        cases(sweep(tmp_path, text), tmp_path)
    first, *lines = str(error.value).splitlines()
    assert first == f"{tmp_path}/sweep.yaml: 2 errors"
    for line, model, size in zip(lines, ("mpt-125m", "mpt-1b"), (256, 512), strict=True):
        assert re.match(
            rf" *gpus\.1 +line 2 +{model} on 7 GPUs: train\.global_batch_size = {size}: must be a multiple of", line
        )
        assert line.endswith("or give the sweep batch_tokens")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("settings: [train.compile=off, train.foo=3]", r"settings\.1 +line 2 +mpt-125m: train\.foo: unknown key"),
        (
            "seq_lens: [64, 4096]\nsettings: [model.max_seq_len=64]",
            r"seq_lens\.1 +line 2 +mpt-125m: data\.seq_len = 4096",
        ),
        (
            "gpus: [3]\nsettings: [train.parallel.context=2]\nbatch_tokens: 4096",
            r"gpus\.0 +line 2 +mpt-125m on 3 GPUs: ",
        ),
    ],
)
def test_what_a_run_cannot_have_is_reported_at_the_key_of_the_sweep(tmp_path, text, told):
    with pytest.raises(ConfigError, match=told):
        cases(sweep(tmp_path, f"models: [mpt-125m]\n{text}\n"), tmp_path)


FIGURES = {
    "step_seconds": 0.5,
    "tokens_per_second": 1000.0,
    "tokens_per_second_per_gpu": 1000.0,
    "mfu": 0.41,
    "hfu": 0.42,
    "peak_gib": 12.0,
    "microbatch_size": 2,
    "grad_accum": 4,
    "global_batch_size": 8,
    "sharding": "full",
    "checkpointing": "none",
}


class Runs:
    """Runs of the cases that `failing` does not name."""

    def __init__(self, failing: str = "-"):
        self.failing, self.made = failing, []

    def __call__(self, case: Case, sweep: Sweep) -> dict[str, Any]:
        self.made.append(case.name)
        return {"error": "step 1\nCUDA out of memory"} if self.failing in case.name.split("-") else dict(FIGURES)


def bench(
    tmp_path: Path, runs: Runs, text: str = "models: [pretrain/mpt-125m]\nseq_lens: [512, 1024]\n", **options
) -> int:
    (tmp_path / "sweep.yaml").write_text(text, encoding="utf-8")
    given = {"file": tmp_path / "sweep.yaml", "out": tmp_path / "out", "again": False} | options
    return command.run(argparse.Namespace(**given), measure=runs)


def test_what_is_measured_is_kept_and_what_failed_is_tried_again(tmp_path):
    first, second, third = Runs(failing="1024"), Runs(), Runs()
    assert bench(tmp_path, first) == 1 and bench(tmp_path, second) == 0 and bench(tmp_path, third) == 0
    assert first.made == ["mpt-125m-512-1gpu-bf16", "mpt-125m-1024-1gpu-bf16"]
    assert second.made == ["mpt-125m-1024-1gpu-bf16"] and third.made == []
    table = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    assert [row["SeqLen (T)"] for row in table] == ["512", "1024"]
    assert (tmp_path / "out" / "results.png").stat().st_size > 5000


def test_a_case_with_other_settings_is_another(tmp_path):
    bench(tmp_path, Runs())
    other = Runs()
    bench(tmp_path, other, "models: [pretrain/mpt-125m]\nseq_lens: [512]\nsettings: [train.compile=off]\n")
    assert other.made == ["mpt-125m-512-1gpu-bf16"]


def tiny_yaml(file: Path, changes: dict[str, Any] | None = None) -> str:
    """A file of a tiny model, and its path."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(tiny_settings(file.parent / "none", file.parent / "run", changes)), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("changes", [{"model.layers": "m s+m"}, {"optimizer.lr": 1e-4}, {"train.compile": "on"}])
def test_an_edited_model_is_measured_again(tmp_path, changes):
    text = f"models: [{tiny_yaml(tmp_path / 'a.yaml')}]\n"
    bench(tmp_path, Runs(), text)
    tiny_yaml(tmp_path / "a.yaml", {"run_dir": "elsewhere", "eval.interval": "7 steps"})
    same, other = Runs(), Runs()
    bench(tmp_path, same, text)
    tiny_yaml(tmp_path / "a.yaml", changes)
    bench(tmp_path, other, text)
    assert same.made == [] and other.made == ["a-32-1gpu-bf16"]


def test_a_model_that_is_edited_while_it_is_measured_gets_no_figure(tmp_path, capsys):
    text = f"models: [{tiny_yaml(tmp_path / 'a.yaml')}]\n"

    class Edited(Runs):
        def __call__(self, case: Case, sweep: Sweep) -> dict[str, Any]:
            tiny_yaml(tmp_path / "a.yaml", {"model.layers": "m s+m"})
            return super().__call__(case, sweep)

    assert bench(tmp_path, Edited(), text) == 1 and "a.yaml was edited before" in capsys.readouterr().out
    again = Runs()
    assert bench(tmp_path, again, text) == 0 and again.made == ["a-32-1gpu-bf16"]


def test_files_with_one_stem_are_distinguished_by_their_folders(tmp_path):
    files = [tiny_yaml(tmp_path / "x" / "a.yaml"), tiny_yaml(tmp_path / "y" / "a.yaml", {"model.layers": "m s+m"})]
    runs = Runs()
    bench(tmp_path, runs, f"models: {json.dumps([*files, tiny_yaml(tmp_path / 'b.yaml')])}\n")
    assert runs.made == ["x-a-32-1gpu-bf16", "y-a-32-1gpu-bf16", "b-32-1gpu-bf16"]
    table = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    assert [row["Model"] for row in table] == ["x-a", "y-a", "b"]
    assert table[0]["NumParams"] != table[1]["NumParams"]


def test_one_stem_in_folders_of_one_name_is_refused_with_both_files(tmp_path):
    files = [tiny_yaml(tmp_path / "x.yml" / "a.yaml"), tiny_yaml(tmp_path / "x.yml" / "a.yml")]
    runs = Runs()
    with pytest.raises(ConfigError, match=r"models\.1 *line 1 .*a.yaml and .*a.yml would both be named x\.yml-a"):
        bench(tmp_path, runs, f"models: {json.dumps(files)}\n")
    assert runs.made == []


def test_all_again_when_asked(tmp_path):
    bench(tmp_path, Runs())
    again = Runs()
    bench(tmp_path, again, again=True)
    assert len(again.made) == 2


def test_a_result_that_was_cut_off_is_measured_again(tmp_path):
    bench(tmp_path, Runs())
    results = tmp_path / "out" / "results.jsonl"
    results.write_text(results.read_text()[:-30], encoding="utf-8")
    again = Runs()
    bench(tmp_path, again)
    assert again.made == ["mpt-125m-1024-1gpu-bf16"]


def test_figures_are_medians_of_the_measured_steps(tmp_path):
    """16 sequences of 512 tokens on 2 GPUs, half a second a step. The run's own rate, of a window, was 4000 at 20 %."""
    batch = "settings: [train.global_batch_size=16, train.microbatch_size=auto]"
    [case] = cases(sweep(tmp_path, f"models: [pretrain/mpt-125m]\nseq_lens: [512]\ngpus: [2]\n{batch}\n"), tmp_path)
    row = {"throughput/tokens_per_second_per_device": 4000.0, "throughput/mfu_foundry": 0.2}
    rows = [row | {"throughput/step_seconds": seconds} for seconds in (0.5, 0.4, 9.0, 0.5, 0.5)]
    resolved = {"microbatch_size": 2, "sharding": {"strategy": "grad_op"}, "activation_checkpointing": {"type": "none"}}
    found = figures(rows, case, resolved)
    assert found["tokens_per_second"] == 16 * 512 / 0.5 and found["tokens_per_second_per_gpu"] == 8192
    assert found["mfu"] == pytest.approx(0.2 * 8192 / 4000) and found["hfu"] is None and found["peak_gib"] is None
    assert (found["microbatch_size"], found["grad_accum"], found["sharding"]) == (2, 4, "grad_op")


def test_a_failure_is_named_below_the_table():
    result = {
        **FIGURES,
        "name": "x",
        "model": "x",
        "seq_len": 8,
        "gpus": 1,
        "gpu": "H200",
        "precision": "bf16",
        "parameters": 5,
    }
    text = as_markdown([result, {"name": "y", "error": "step 1\nCUDA out of memory"}], "a machine")
    assert "- y: CUDA out of memory" in text and "| 41.00 |" in text
    assert len(as_csv([result, {"name": "y", "error": "?"}]).splitlines()) == 2
    assert json.loads(json.dumps(result)) == result


def test_a_line_separator_within_a_result_does_not_end_its_line(tmp_path):
    (tmp_path / "r.jsonl").write_text(
        json.dumps({"name": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert list(command.read_results(tmp_path / "r.jsonl")) == ["a\u2028b\x85c"]
