"""Kernels that a step needs and those that compile_process.py finds before it, for a GPU that is not here: no kernel is compiled.

    python -m tests.support.compile_keys CONFIG.json PLATFORM

CONFIG.json: of a Config. PLATFORM: a key of PLATFORMS. Prints JSON: `found` and `needed`, of each the names.
"""

import json
import sys
from pathlib import Path

import torch

from llmtrain.distributed.world import initialize, world_from_environment
from llmtrain.kernels import launch
from llmtrain.kernels.platform import Platform
from llmtrain.objectives.base import compute_loss
from llmtrain.schema.config import Config
from llmtrain.train.build import build
from llmtrain.train.compile_process import pass_over

PLATFORMS = {
    "h200": Platform("nvidia", "sm90", "NVIDIA H200", 150 << 30, 132),
    "mi300x": Platform("amd", "gfx942", "AMD Instinct MI300X", 192 << 30, 304),
}


def main() -> None:
    config, found, needed = Config.model_validate_json(Path(sys.argv[1]).read_text()), set[str](), set[str]()
    pass_over(config, PLATFORMS[sys.argv[2]], 1, 1, lambda name, _: found.add(name))
    launch.COMPILE[:] = [lambda name, _: needed.add(name)]
    step(config)
    print(json.dumps({"found": sorted(found), "needed": sorted(needed)}))


def step(config: Config) -> None:
    """Two microbatches by the model as a rank builds it: sharded, with checkpointed and compiled layers where the config says so.
    On the CPU, where kernels are not launched and results hold anything."""
    training = build(config, world_from_environment(), initialize())
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    tokens = torch.zeros(config.train.least_microbatch, config.data.seq_len, dtype=torch.int64)
    batch = {"input_ids": tokens, **training.objective.example(tokens)}
    if config.data.mask_documents:
        batch["document_ids"] = torch.zeros_like(tokens)
    for _ in range(2):
        compute_loss(training.model, training.objective, batch).loss.backward()


if __name__ == "__main__":
    main()
