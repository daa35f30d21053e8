"""LayerPart.metrics and after_step in training, and a report that fails behind it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.models.layers import Linear
from llmtrain.train import worker
from llmtrain.train.callbacks.layer_parts import layer_parts
from tests.support import experts


def test_a_model_whose_layers_have_nothing_to_do_gets_no_callback():
    stability: Any = SimpleNamespace(skipped_in_a_row=0)
    plain: Any = SimpleNamespace(hybrid=Linear(2, 2))
    assert not layer_parts(plain, stability)
    assert len(layer_parts(experts.build(), stability)) == 1


@pytest.mark.parametrize("skipped", [0, 1])
def test_layers_are_measured_each_step_and_changed_after_those_taken(skipped: int):
    model: Any = experts.build(router=experts.BIASED)
    stability: Any = SimpleNamespace(skipped_in_a_row=skipped)
    logged: dict[str, float] = {}
    logger: Any = SimpleNamespace(log_metrics=logged.update)
    [callback] = layer_parts(model, stability)
    layer = model.hybrid.blocks[1].mlp
    layer.load.copy_(torch.tensor([3.0, 1.0, 2.0, 2.0]))
    callback.after_train_batch(None, logger)  # type: ignore[arg-type]
    callback.batch_end(None, logger)  # type: ignore[arg-type]
    assert [logged[f"blocks.1.mlp/load_{i}"] for i in range(4)] == [0.375, 0.125, 0.25, 0.25]
    assert layer.choice_bias.tolist() == ([0] * 4 if skipped else [-0.5, 0.5, 0, 0])
    assert not layer.load.any()


def test_a_report_that_fails_leaves_the_run_complete(monkeypatch, caplog, tmp_path):
    from llmtrain.train import run
    from llmtrain.train.report import summary

    def fails(*_: object, **__: object) -> None:
        raise AttributeError("no such part")

    finished: list[bool] = []
    outcome = SimpleNamespace(uploads=SimpleNamespace(finish=lambda: finished.append(True)))
    monkeypatch.setattr(run, "train", lambda config, verified: outcome)
    monkeypatch.setattr(summary, "report", fails)
    config: Any = SimpleNamespace(run_dir=str(tmp_path))
    monkeypatch.setattr(worker, "hold_folder", lambda folder: None)
    monkeypatch.setattr(worker, "await_compiled", lambda *_: None)
    assert worker._train(config, None, "run.yaml", []) == 0 and finished == [True]
    assert "training is complete, but not its report: AttributeError: no such part" in caplog.text
