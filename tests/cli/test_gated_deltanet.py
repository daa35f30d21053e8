"""A Gated DeltaNet hybrid in one line of YAML through every verb of the command line."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.contributing import run_in_one_process
from tests.support.project import Project

TASK = {"name": "house", "type": "multiple_choice", "source": {"path": "task.jsonl"}}
DOCUMENT = {"query": "the quick brown", "choices": ["fox", "wizards"], "gold": 0}
MLP = {"type": "swiglu", "d_ff": 48}
QWEN3_NEXT = {
    "model.norm": {"type": "rmsnorm", "eps": 1e-6, "zero_centered": True},
    "model.blocks": {
        "g": {
            "type": "gated_deltanet",
            "n_heads": 4,
            "n_key_heads": 2,
            "key_head_dim": 8,
            "value_head_dim": 8,
            "mlp": MLP,
        },
        "attn": {
            **{"type": "attention", "n_heads": 2, "qk_norm": "head", "output_gate": True, "mlp": MLP},
            "position": {"type": "rotary", "fraction": 0.25},
        },
    },
    "model.layers": "g*3 attn",
}


def llmtrain(folder: Path, *commands: str) -> list[str]:
    """Texts that commands print, run one after another in one process."""
    ran = run_in_one_process(folder, [f"uv run llmtrain {command}" for command in commands])
    assert [one.status for one in ran] == [0] * len(commands), "\n".join(one.text for one in ran)
    return [one.text for one in ran]


@pytest.mark.slow
def test_trains_resumes_generates_is_scored_and_exported(project: Project):
    project.write(QWEN3_NEXT)
    (project.folder / "task.yaml").write_text(json.dumps(TASK))
    (project.folder / "task.jsonl").write_text(json.dumps(DOCUMENT))
    (project.folder / "eval.yaml").write_text(json.dumps({"name": "scored", "out": "scored", "tasks": ["task.yaml"]}))
    checked, described, trained, resumed, generated, _, _, _, again, _ = llmtrain(
        project.folder,
        "check run.yaml",
        "describe run.yaml",
        "train run.yaml",
        "train run.yaml train.duration='8 steps'",
        "generate run --prompt 'the quick' --max-new-tokens 8",
        "eval eval.yaml model=run",
        "export run exported",
        "import exported imported",
        "generate imported --prompt 'the quick' --max-new-tokens 8",
        "export imported twice",
    )
    assert "4 layers (3 gated_deltanet, 1 attention)" in checked
    assert "Qwen3NextForCausalLM" in described and "gated_deltanet: 4 heads x 8 x 8 (2 key heads)" in described
    assert "step 6/6" in trained and "step 8/8" in resumed and "resumed from" in resumed
    assert generated.startswith("the quick") and again.splitlines()[0] == generated.splitlines()[0]
    scored = json.loads((project.folder / "scored" / "results.json").read_text())["results"]
    assert {one["task"] for one in scored} == {"house"}
    once, twice = (load_file(project.folder / name / "model.safetensors") for name in ("exported", "twice"))
    assert once.keys() == twice.keys() and all((once[name] == twice[name]).all() for name in once)
