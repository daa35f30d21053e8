"""A whole run whose answers `llmtrain serve` draws with the weights of the run's beginning, which its own then leave."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.train.report.loggers import read_metrics
from tests.support.policy import policy_config, sums_data
from tests.support.processes import LLMTRAIN, output_of
from tests.support.served import ended, serving

MOST = 1.02
"""Limit of the importance weights: of tokens, some of which are above it when the weights differ."""


def train(folder: Path, data: Path, name: str, changes: dict[str, Any]) -> Path:
    """The folder of a tiny run of a policy."""
    config = policy_config(data, folder / name, changes)
    (folder / f"{name}.yaml").write_text(config.model_dump_json())
    output_of(*LLMTRAIN, "train", str(folder / f"{name}.yaml"))
    return folder / name


@pytest.mark.ci
def test_a_server_draws_the_answers_of_a_run(tmp_path: Path):
    data = sums_data(tmp_path)
    base = train(tmp_path, data, "base", {})
    with serving(base, "--max-len", "32") as (process, address):
        rollout = {
            "type": "openai",
            "url": f"{address}/v1",
            "model": "base",
            "correction": "token_truncate",
            "most": MOST,
        }
        changes = {"init_from": {"path": str(base)}, "objective.rollout": rollout, "train.duration": "6 steps"}
        run = train(tmp_path, data, "run", changes)
        process.terminate()
        status, rest = ended(process)
    assert status == 0 and "Traceback" not in rest, rest
    of = {name: read_metrics(run / "metrics.jsonl", f"policy/{name}")[1] for name in ("mismatch", "importance")}
    assert len(of["mismatch"]) == 6 and of["mismatch"][0] < 1e-5 and of["importance"][0] == pytest.approx(1, abs=1e-5)
    # The server keeps the old weights: the further the trained ones are from them, the less are the answers of the policy.
    assert of["mismatch"][-1] > 10 * of["mismatch"][0] + 1e-3
    assert all(one <= MOST for one in of["importance"]) and of["importance"][-1] != pytest.approx(1, abs=1e-5)
