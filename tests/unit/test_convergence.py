"""The picture, the table and the averages of benchmarks convergence."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks.programs.training import convergence
from llmtrain.errors import RunError

ONE = {
    "parameters": 100_000_000,
    "tokens_per_second": 5e5,
    "tokens": [65_536, 131_072],
    "seconds": [0.2, 0.4],
    "loss": [9.7, 9.1],
}


def test_the_average_has_no_bias_to_its_beginning():
    assert convergence._smoothed([3.0] * 40) == pytest.approx([3.0] * 40)
    falling = convergence._smoothed([10.0, *[2.0] * 200], half_life=5)
    assert falling[0] == 10 and falling[5] == pytest.approx(2 + 8 * 0.5 / sum(0.5 ** (i / 5) for i in range(6)))
    assert falling[-1] == pytest.approx(2)


def test_each_model_is_drawn_over_tokens_and_seconds(tmp_path):
    convergence.plot({"a": ONE, "b": ONE | {"loss": [9.6, 8.9]}}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_loads_of_a_mixture_are_kept_in_some_steps_and_drawn(tmp_path):
    layers, experts, steps = 3, 12, 130
    shares = {
        f"blocks.{layer}.mlp/load_{expert}": (expert + 1) / 78 if layer == 2 else 1 / 12
        for layer in range(layers)
        for expert in range(experts)
    }
    rows = [{"step": i + 1, "blocks.0.mlp/load_max": 9.0, **shares} for i in range(steps)]
    found = convergence.loads(rows)
    assert found["load_steps"] == list(range(1, steps + 1, 2))
    even, of_third = [1.0] * experts, [round(12 * (expert + 1) / 78, 3) for expert in range(experts)]
    assert found["loads"] == [[even, even, of_third]] * 65
    assert convergence.loads([{"step": 1}]) == {}
    convergence.plot({"dense": ONE}, tmp_path / "one.png")
    convergence.plot({"mixture": ONE | found, "dense": ONE}, tmp_path / "two.png")
    one, two = ((tmp_path / f"{name}.png").read_bytes()[16:24] for name in ("one", "two"))
    assert one[:4] == two[:4] and int.from_bytes(two[4:]) == 2 * int.from_bytes(one[4:])


def test_steps_that_compile_or_are_interrupted_count_as_usual_ones():
    seconds = [30.0, 2.0, 9.0, 0.4, 0.5, 0.6]
    rows = [{"step": i + 1, convergence.LOSS: 9.0 - i, convergence.SECONDS: seconds[i]} for i in range(len(seconds))]
    one = convergence.curve(rows, uncounted=3, tokens_per_step=1000)
    assert one["seconds"] == pytest.approx([0.5, 1.0, 1.5, 1.9, 2.4, 3.0])
    assert one["tokens"] == [1000, 2000, 3000, 4000, 5000, 6000] and one["tokens_per_second"] == pytest.approx(2000)


def test_losses_are_compared_where_the_shortest_run_ends():
    slow = ONE | {"seconds": [0.3, 0.6]}
    longer = ONE | {"tokens": [65_536, 131_072, 196_608], "seconds": [0.2, 0.4, 0.6], "loss": [9.7, 9.7, 5.0]}
    lines = convergence.table({"slow": slow, "longer": longer})
    assert "after 0.1M tokens | after 0.6 s" in lines[0]
    _, name, _, _, by_tokens, by_seconds, at_end, _ = (cell.strip() for cell in lines[3].split("|"))
    assert name == "longer" and by_tokens == "9.700" and by_seconds == at_end != by_tokens
    assert convergence.table({}) == []


def test_a_torn_line_of_a_running_log_is_not_read(run):
    line = '{"step": %d, "loss/train/cross_entropy": 5.0, "throughput/step_seconds": 0.5}'
    run.folder.mkdir()
    (run.folder / "metrics.jsonl").write_text(
        f'{line % 1}\n{{"step": 1, "loss/validation": 1.0}}\n{line % 2}\n{line[:20]}'
    )
    assert [row["step"] for row in run.rows()] == [1, 2]


def test_a_run_that_ends_by_itself_is_named_with_its_last_lines(run, monkeypatch):
    monkeypatch.setattr(run, "start", lambda: start(run, "print('out of memory'); raise SystemExit(1)"))
    with pytest.raises(RunError, match="after 0 steps:\nout of memory"):
        run.train(seconds=1.0)


def test_a_run_ends_at_its_last_step(run, monkeypatch):
    monkeypatch.setattr("llmtrain.flops.count.count_parameters", lambda model: SimpleNamespace(total=1))
    run.folder.mkdir()
    rows = [{"step": i + 1, convergence.LOSS: 5.0, convergence.SECONDS: 0.5} for i in range(8)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start(run, "import time; time.sleep(60)")
    run.train(seconds=1000.0, steps=6)
    assert len(run.result(steps=6)["loss"]) == 6 and run.ended()


@pytest.mark.slow
def test_sigterm_keeps_what_the_model_in_training_has_reached(tmp_path):
    program = f"""
import sys, time
from benchmarks.programs.training import convergence
from tests.unit.test_convergence import start

def begin(run):
    start(run, "import time; time.sleep(60)")
    run.folder.mkdir()
    rows = [f'{{{{"step": {{i + 1}}, "{convergence.LOSS}": 5.0, "{convergence.SECONDS}": 0.5}}}}\\n' for i in range(8)]
    (run.folder / "metrics.jsonl").write_text("".join(rows))

convergence.Run.start, convergence._parameters = begin, lambda config: 1
convergence.main(["one=yamls/bench/zamba2-105m.yaml", "other=yamls/bench/zamba2-105m.yaml", "--out", {str(tmp_path)!r}])
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    for line in process.stdout or ():
        if line.startswith("other: compiled"):
            break
    time.sleep(0.3)
    process.terminate()
    assert process.wait(100) == 143
    assert list(json.loads((tmp_path / "convergence.json").read_text())["models"]) == ["one"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.yaml", "folder/a.yaml"], "a name stands for several runs: give NAME=FILE"),
        (["a.yaml", "--for", "b", "seed=2"], "--for b: no such run"),
    ],
)
def test_runs_are_distinguished_by_their_names(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(convergence, "Run", lambda name, *_: SimpleNamespace(name=name))
    with pytest.raises(SystemExit):
        convergence.main([*arguments, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err


def test_a_run_stands_still_and_is_killed(run):
    start(run, "import time\nfor i in range(2000): print(i, flush=True); time.sleep(0.01)")
    while not run.log.read_text().strip():
        time.sleep(0.01)
    run.signal(convergence.signal.SIGSTOP)
    time.sleep(0.05)
    seen = run.log.read_text()
    time.sleep(0.1)
    assert run.log.read_text() == seen and not run.ended()
    run.kill()
    assert run.ended()


@pytest.fixture
def run(tmp_path):
    return convergence.Run("zamba2", "yamls/bench/zamba2-105m.yaml", [], tmp_path)


def start(run, program):
    with run.log.open("ab") as log:
        run.process = subprocess.Popen([sys.executable, "-c", program], stdout=log, stderr=log, start_new_session=True)


def test_results_of_several_calls_make_one_picture(tmp_path, capsys):
    for name in ("muon", "adamw"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"models": {name: ONE}}))
    picture = tmp_path / "both.png"
    assert convergence.main(["--picture", str(picture), *(str(tmp_path / f"{n}.json") for n in ("muon", "adamw"))]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["| muon", "| adamw"]
