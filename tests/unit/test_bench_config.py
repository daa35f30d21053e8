"""`llmtrain bench tune FILE` and what `doctor FILE` says of it, on no GPU: searches and measurements are made up."""

import argparse
from dataclasses import asdict, replace

import pytest

from llmtrain.bench.tune import backends, config_command
from llmtrain.bench.tune.config_command import items, shapes
from llmtrain.commands.bench import add_bench
from llmtrain.doctor import blocks
from llmtrain.errors import UserError
from llmtrain.kernels import platform, registry, tuning, tuning_table
from llmtrain.kernels.attention import measured
from llmtrain.kernels.attention.measured import Cell, Row
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.triton_launch import Launch
from llmtrain.kernels.operation import Shape, search
from llmtrain.kernels.platform import Platform
from llmtrain.schema.load import load_config

H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30, 132)
YAMLS = ("gemma3-1b", "zamba2-7b", "falcon-h1-0.5b", "mpt-7b-alibi", "nemotron-h-8b", "gemma2-2b", "llama3-8b")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """An empty folder for the user's rows, and a GPU that is only claimed."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LLMTRAIN_TUNING", raising=False)
    monkeypatch.setattr(platform, "detect", lambda *device: H200)
    tuning.forget()
    measured.forget()
    yield tmp_path / "llmtrain/tuning"
    tuning.forget()
    measured.forget()


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers())
    return parser.parse_args(["bench", "tune", *words])


@pytest.mark.parametrize("name", YAMLS)
def test_every_kernel_of_a_model_becomes_a_case_that_its_problem_takes(name):
    config = load_config(name)
    found = items(config, H200)
    assert len(found) == len(set(found)) > 0
    for item in found:
        made = search(item.operation, item.shape.fields(), "meta", H200)
        assert all(made.candidates(part, quick=True) for part in made.parts)
    kernels = [part.kernel(config.model.d_model) for block in config.model.blocks.values() for _, part in block.parts()]
    attention = {kernel.spec for kernel in kernels if kernel and isinstance(kernel.spec, AttentionSpec)}
    assert {shape.spec for shape in shapes(config, H200)} == attention
    for shape in shapes(config, H200):
        assert (shape.seq_len, shape.batch) == (config.data.seq_len, config.train.microbatch_size)
    assert {item.shape.spec for item in found if item.operation == "attention"} == attention
    assert len({item.label for item in found}) == len(found)


@pytest.mark.parametrize("seq_len, batch", [(2048, 8), (32768, 1)])
def test_with_an_automatic_microbatch_it_measures_on_about_16384_tokens(seq_len, batch):
    settings = ["train.microbatch_size=auto", f"data.seq_len={seq_len}", f"model.max_seq_len={seq_len}"]
    assert [(shape.seq_len, shape.batch) for shape in shapes(load_config("mpt-125m", settings), H200)] == [
        (seq_len, batch)
    ]


def test_a_block_that_names_a_backend_is_neither_tuned_nor_measured():
    config = load_config("llama3-8b", ["model.blocks.attn.backend=flex"])
    assert shapes(config, H200) == []
    assert "attention" not in {item.operation for item in items(config, H200)}


class MadeUp:
    """Searches and measurements that take no time, and are interrupted after `left` of them."""

    def __init__(self, monkeypatch, times: dict[str, float]):
        self.tuned, self.measured, self.left, self.times = [], [], 10**6, times
        monkeypatch.setattr(config_command.command, "tuned", self.tune)
        monkeypatch.setattr(config_command, "BackendMeasurer", lambda here: self)

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def tune(self, args, operation, case, parts, here, seq_len, variant):
        self.step()
        self.tuned.append(operation)
        made = {"device": here.device_name, "date": "2026-11-24", "commit": "abc", "ms": 1.0, "tflops": 1.0}
        if operation == "attention":
            shape, launch = (case["spec"]["head_dim"],), Launch(64, 32, 4, 1)
            kernels = [f"attention.{part}" for part in parts]
        else:  # any launch of the shipped table
            kernels = [k for k in tuning_table.KERNELS if k.partition(".")[0] == operation]
            names = tuning_table.KERNELS[kernels[0]].shape
            shape = tuple(getattr(search(operation, case, "meta", here).spec, name) for name in names)
            row = tuning.select(kernels[0], case["spec"]["dtype"], dict(zip(names, shape, strict=True)), here)
            launch = row.launch
        return [
            tuning_table.Row(kernel, case["spec"]["dtype"], shape, launch, 0, made, seq_len, variant)
            for kernel in kernels
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, shape: Shape, backend: str) -> Row | str:
        self.step()
        self.measured.append(backend)
        if backend not in self.times:
            return "RuntimeError: not today"
        ms = self.times[backend]
        return Row(
            **asdict(Cell.of(shape.spec, shape.seq_len)), backend=backend, forward_ms=ms / 2, backward_ms=ms / 2,
            device=H200.device_name, date="2026-11-24", commit="abc",
        )  # fmt: skip


def test_after_it_auto_takes_what_was_fastest_here_and_doctor_states_on_which_measurement(own, monkeypatch, capsys):
    config = load_config("llama3-8b")
    spec = shapes(config, H200)[0].spec
    before = registry.resolve("attention", "auto", spec, H200, config.model.max_seq_len).name
    fastest = "sdpa:flash" if before != "sdpa:flash" else "sdpa:cudnn"
    made = MadeUp(monkeypatch, {fastest: 1.0, before: 2.0, "triton": 3.0})
    assert config_command.run(arguments("llama3-8b"), config) == 0
    assert registry.resolve("attention", "auto", spec, H200, config.model.max_seq_len).name == fastest
    assert set(made.measured) > {fastest, before, "triton"}
    assert "RuntimeError: not today" in capsys.readouterr().err
    assert blocks.run(config) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if " attention " in line)
    assert f"{fastest}  measured on NVIDIA H200, 2026-11-24 (abc): 1 ms at 32 on 8 x 128, plain, T=8192" in line
    assert own.joinpath("sm90.yaml").exists() and own.joinpath("sm90.attention.csv").exists()


def test_interrupted_it_goes_on_where_it_was(own, monkeypatch):
    config = load_config("zamba2-7b")
    able = backends.able(shapes(config, H200)[0].spec, H200)
    made = MadeUp(monkeypatch, dict.fromkeys(able, 1.0))
    whole = len(items(config, H200)) + len(able)
    for interrupted in range(1, 4):
        made.left = 2
        with pytest.raises(KeyboardInterrupt):
            config_command.run(arguments("zamba2-7b"), config)
        assert len(made.tuned) + len(made.measured) == 2 * interrupted < whole
    made.left = 10**6
    assert config_command.run(arguments("zamba2-7b"), config) == 0
    assert len(made.tuned) + len(made.measured) == whole
    assert config_command.run(arguments("zamba2-7b"), config) == 0
    assert len(made.tuned) + len(made.measured) == whole
    assert config_command.run(arguments("zamba2-7b", "--again"), config) == 0
    assert len(made.tuned) + len(made.measured) == 2 * whole


def test_what_was_measured_of_ours_is_measured_again_when_its_launches_are_new(own, monkeypatch):
    config = load_config("llama3-8b")
    made = MadeUp(monkeypatch, {"triton": 1.0, "flex": 2.0})
    config_command.run(arguments("llama3-8b"), config)
    own.joinpath("sm90.yaml").unlink()
    made.measured.clear()
    config_command.run(arguments("llama3-8b"), config)
    assert "triton" in made.measured and "flex" not in made.measured


def test_rows_of_another_device_are_neither_taken_for_tuned_nor_for_measured(own, monkeypatch):
    config = load_config("llama3-8b")
    made = MadeUp(monkeypatch, {"triton": 1.0, "flex": 2.0})
    config_command.run(arguments("llama3-8b"), config)
    done = len(made.tuned)
    monkeypatch.setattr(platform, "detect", lambda *device: replace(H200, device_name="NVIDIA H100"))
    config_command.run(arguments("llama3-8b"), config)
    assert len(made.tuned) == 2 * done


@pytest.mark.parametrize(
    "words", [("--shape", "head_dim=64"), ("--seq-len", "4"), ("--operation", "ssd"), ("--into-package",)]
)
def test_a_file_goes_with_no_shape_of_its_own(own, words):
    with pytest.raises(UserError, match="takes its shapes from the file: leave out"):
        config_command.run(arguments("llama3-8b", *words), load_config("llama3-8b"))


def test_rejects_a_file_that_cannot_be_written_before_any_search(own, monkeypatch, tmp_path):
    monkeypatch.setattr(config_command.command, "tuned", lambda *_: pytest.fail("a search began"))
    with pytest.raises(UserError, match="is a folder, where rows need a file"):
        config_command.run(arguments("llama3-8b", "--out", str(tmp_path)), load_config("llama3-8b"))


def test_the_file_that_it_makes_may_be_named_before_it_exists(own, monkeypatch, tmp_path):
    MadeUp(monkeypatch, {"triton": 1.0})
    config, named = load_config("zamba2-7b"), tmp_path / "none.yaml"
    monkeypatch.setenv("LLMTRAIN_TUNING", str(named))
    with pytest.raises(UserError, match=r"LLMTRAIN_TUNING names .*none.yaml, which does not exist"):
        config_command.run(arguments("zamba2-7b", "--dry-run"), config)
    assert config_command.run(arguments("zamba2-7b"), config) == 0
    assert named.exists()


def test_without_a_gpu_it_reports_it_before_anything(monkeypatch):
    with pytest.raises(UserError, match="this machine has none"):
        config_command.run(arguments("llama3-8b"), load_config("llama3-8b"))


def test_a_measurement_is_real_and_a_backend_that_cannot_serve_gives_the_reason():
    asked = {"spec": asdict(AttentionSpec(2, 1, 16, 0.25, dtype="float32")), "seq_len": 64, "batch": 1}
    found = backends.answer({**asked, "backend": "sdpa:cpu"})
    assert found["failed"] is None and found["forward_ms"] > 0 and found["backward_ms"] > 0
    assert "need a GPU" in backends.answer({**asked, "backend": "triton"})["failed"]


def test_doctor_fails_where_a_named_backend_cannot_serve(own, capsys):
    assert blocks.run(load_config("llama3-8b"), "float32") == 0
    named = load_config("llama3-8b", ["model.blocks.attn.backend=sdpa:flash"])
    assert blocks.run(named, "float32") == 1
    assert "needs bfloat16, not float32" in capsys.readouterr().out
