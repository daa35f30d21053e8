"""What a run of another length says of the learning rate, and the commands that a finished run suggests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.schema.config import Config
from llmtrain.schema.schedule import resolve
from llmtrain.train import extend
from llmtrain.train.extend import extension_notice, longer_run
from tests.support.tiny import tiny_config

WSD = {"type": "wsd", "warmup": "10 steps", "decay": "20 steps"}
COSINE = {"type": "cosine", "warmup": "10 steps"}


def config(schedule: dict[str, Any], duration: str = "100 steps", **changes: Any) -> Config:
    lengths = {"optimizer.lr": 1.0, "schedule": schedule, "train.duration": duration}
    return tiny_config(Path("shards"), Path("runs/tiny"), lengths | changes)


def notice(schedule: dict[str, Any], before: str, after: str, step: int) -> str | None:
    old, new = config(schedule, before), config(schedule, after)
    saved: Any = SimpleNamespace(config=old.model_dump(mode="json"), step=step)
    return extension_notice(new, saved, resolve(new, 16), 16)


@pytest.fixture
def kept(monkeypatch) -> None:
    """A checkpoint before the decay of a run of 100 steps."""

    def before(run: str, step: int) -> Any:
        return SimpleNamespace(address=f"{run}/checkpoints/step-{step:08d}")

    monkeypatch.setattr(extend, "checkpoint_before", before)


@pytest.mark.parametrize(
    ("schedule", "before", "after", "step"),
    [
        (COSINE, "100 steps", "100 steps", 100),  # the same run again
        (COSINE, "100 steps", "25600 tokens", 50),  # the same length in other words
        (COSINE, "100 steps", "50 steps", 100),  # complete: no step follows
    ],
)
def test_nothing_to_say(schedule, before, after, step):
    assert notice(schedule, before, after, step) is None


@pytest.mark.parametrize(
    ("schedule", "step", "rates"),
    [
        ({"type": "constant"}, 100, ("1", "1")),
        ({"type": "inverse_sqrt", "warmup": "10 steps"}, 100, ("0.318", "0.316")),
        (WSD, 80, ("1", "1")),  # the decay has not begun
        (COSINE, 5, ("0.5", "0.6")),  # in the warmup the rate rises anyway
    ],
)
def test_a_rate_that_goes_on_is_reported(schedule, step, rates):
    text = notice(schedule, "100 steps", "200 steps", step)
    assert text == (
        f"train.duration was 100 steps and is 200: the learning rate was {rates[0]} at step {step} "
        f"and is {rates[1]} at step {step + 1}"
    )


def test_a_finished_wsd_run_goes_on_from_before_its_decay(kept):
    text = notice(WSD, "100 steps", "200 steps", 100)
    assert text and text.startswith(
        "WARNING: train.duration was 100 steps and is 200: the learning rate was 0.05 at step 100"
    )
    assert "is 1 at step 101, which is a jump" in text
    assert "copy runs/tiny/checkpoints/step-00000080 to" in text


def test_without_a_checkpoint_from_before_the_decay_it_reports_it():
    text = notice(WSD, "100 steps", "200 steps", 90)
    assert text and "no checkpoint from before it is here" in text


def test_a_cosine_rises_again():
    text = notice(COSINE, "100 steps", "200 steps", 100)
    assert text and text.startswith("WARNING") and "was 0.1 at step 100 and is 0.587 at step 101" in text
    assert "init_from=runs/tiny optimizer.lr=0.1 schedule.type=constant" in text


def test_a_shorter_run_falls_at_once():
    text = notice(COSINE, "100 steps", "60 steps", 55)
    assert text and text.startswith("WARNING") and "was 0.566 at step 55 and is 0.122 at step 56" in text


def test_a_warmup_in_percent_begins_again():
    text = notice({"type": "constant", "warmup": "10 %"}, "100 steps", "5000 steps", 100)
    assert text and text.startswith("WARNING") and "was 1 at step 100 and is 0.202 at step 101" in text


def suggested(made: Config, *overrides: str) -> list[str]:
    return longer_run(made, resolve(made, 16), 16, "llmtrain train", ["run.yaml", *overrides])


def test_where_the_rate_goes_on_a_longer_run_is_a_resumed_one():
    assert suggested(config({"type": "constant"})) == [
        "llmtrain train run.yaml train.duration='200 steps'   # resume, and train on"
    ]
    assert "train.duration='1.5 epochs'" in suggested(config({"type": "constant"}, "0.75 epochs"))[0]


def test_a_longer_run_has_each_setting_once(kept):
    given = ["train.duration=100 steps", "optimizer.lr=1e-3", "run_dir=runs/tiny"]
    assert suggested(config({"type": "constant"}), *given)[0].startswith(
        "llmtrain train run.yaml optimizer.lr=1e-3 run_dir=runs/tiny train.duration='200 steps'  "
    )
    assert suggested(config(WSD), *given)[1].startswith(
        "llmtrain train run.yaml optimizer.lr=1e-3 train.duration='200 steps' name=tiny-longer run_dir=runs/tiny-longer  "
    )


def test_a_longer_wsd_run_is_a_copy_from_before_the_decay(kept):
    assert suggested(config(WSD)) == [
        "mkdir -p runs/tiny-longer/checkpoints && cp -r runs/tiny/checkpoints/step-00000080 runs/tiny-longer/checkpoints",
        "llmtrain train run.yaml train.duration='200 steps' name=tiny-longer run_dir=runs/tiny-longer"
        "   # train on, from before the decay",
    ]


@pytest.mark.parametrize(
    ("remote", "expected"), [("s3://b/runs", "checkpoint.remote=s3://b/runs-longer"), ("s3://b/tiny", None)]
)
def test_the_copy_gets_a_store_of_its_own(kept, remote, expected):
    line = suggested(config(WSD, **{"checkpoint.remote": remote}))[1]
    assert (expected in line) if expected else "remote" not in line


def test_where_the_rate_would_jump_a_longer_run_begins_anew():
    [line] = suggested(config(COSINE))
    assert line.startswith("llmtrain train --fresh run.yaml train.duration='200 steps'   # anew, twice as long; ")
    assert line.endswith("resuming would take the learning rate from 0.1 to 0.587")
