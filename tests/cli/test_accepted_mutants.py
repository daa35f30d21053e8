"""What `llmtrain check` accepts, trains: a step of a hundred accepted mutants of a tiny run. LLMTRAIN_FUZZ_SEED as elsewhere."""

import copy
import importlib
import json
import multiprocessing
import os
import random
import resource
from pathlib import Path
from typing import Any

import pytest

from llmtrain.commands.checks import load_runnable
from llmtrain.errors import UserError
from tests.support.mutants import places
from tests.support.tiny import tiny_config

NUMBERS = [0, 1, 2, 3, 7, 8, 15, 16, 24, 64, 96, 1000, 65_537, 10**6, 10**9, 2**31, 2**63, -1]
REALS = [0.0, 1e-300, 1e-12, 1e-3, 0.3, 0.999, 1.0, 2.5, 100.0, 1e5, 1e9, 1e30, -0.5]
CHOICES = """
    none full every_k selective grad_op hybrid cosine linear constant inverse_sqrt wsd fp32 amp_bf16 auto plain chunked stop
    skip layernorm rmsnorm gelu swiglu geglu learned rotary alibi attention mamba2 shared_attention reference sdpa head on off x
""".split()  # noqa: SIM905
TEXTS = [
    "1 steps", "3 steps", "300 tokens", "2 epochs", "5 %", "1e-9 %", "x", "a/b", "", "ü", "m", "m a", "(m a)*3",
    "s+a m",
]  # fmt: skip
MOST_BYTES = 12 << 30


def mutate(rng: random.Random, settings: dict[str, Any]) -> str:
    """Change one setting in place; returns what was changed."""
    container, key = rng.choice(places(settings))
    old = container[key]
    if isinstance(old, bool) or (isinstance(old, (dict, list)) and rng.random() < 0.5) or rng.random() < 0.05:
        new: Any = rng.choice([True, False, None])
    elif isinstance(old, int):
        new = rng.choice(NUMBERS)
    elif isinstance(old, float):
        new = rng.choice(REALS)
    else:
        new = rng.choice([*CHOICES, *TEXTS, *NUMBERS[:8], *REALS, None])
    container[key] = new
    return f"{key}: {old!r} -> {new!r}"


def train_one_step(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    os.environ |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    from llmtrain.commands.checks import load_runnable
    from llmtrain.train.worker import run_rank

    log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os._exit(
        run_rank(lambda ranks: load_runnable(path, ["train.duration=1 steps"], world_size=ranks), path, [], False) or 0
    )


@pytest.mark.slow
def test_a_hundred_accepted_mutants_train_a_step(shards, tmp_path, monkeypatch):
    importlib.import_module("llmtrain.train.run")  # once, for the children too

    monkeypatch.chdir(tmp_path)
    rng = random.Random(int(os.environ.get("LLMTRAIN_FUZZ_SEED", "19")))
    good = tiny_config(
        shards,
        tmp_path / "run",
        {
            "model.blocks.a": {"type": "attention", "n_heads": 4, "mlp": {"d_ff": 64}},
            "model.layers": "m a s+m",
            "schedule": {},
        },
    ).model_dump(mode="json")
    failed, trained = [], 0
    while trained < 100:
        settings = copy.deepcopy(good)
        changed = [mutate(rng, settings) for _ in range(rng.choice([1, 1, 2]))]
        settings["run_dir"] = (
            str(tmp_path / f"run{trained}") if settings["run_dir"] == good["run_dir"] else settings["run_dir"]
        )
        file = tmp_path / f"{trained}.yaml"
        file.write_text(json.dumps(settings))
        try:
            load_runnable(str(file), ["train.duration=1 steps"], world_size=1)
        except UserError:
            continue
        trained += 1
        child = multiprocessing.get_context("fork").Process(target=train_one_step, args=(str(file),))
        child.start()
        child.join()
        if child.exitcode != 0:
            log = Path(f"{file}.log")
            failed.append(f"{changed}: status {child.exitcode}: {log.read_text()[-600:] if log.exists() else ''}")
    assert len(failed) <= 2, "\n\n".join(failed)
