"""Associative recall of small models at several lengths (Zoology, arXiv:2312.04927): keys with their values, then each key once
more among noise, behind which the model shall give its value.

    python -m benchmarks recall --out FOLDER [--models NAME…] [--lengths 64 128 256 512] [--steps 1500] [--seconds 50]
        [--backend auto]

Two layers of each mixer, with an MLP, are trained for --steps (or --seconds, if these are over sooner) on the lengths in turn, an
eighth of each as many pairs, then asked at these and at twice the longest. FOLDER gets recall.json, rewritten after each model.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Parser, number, positive
from benchmarks.harness.report import device_name, rounded

WIDTH, WORDS = 128, 512
"""Channels; entries of the vocabulary: the first quarter keys, the second values, the rest noise."""
ROTARY, HEADS = {"type": "rotary"}, {"n_heads": 2, "head_dim": 64}
MAMBA, DELTA = {"d_state": 64, "head_dim": 64}, {"n_heads": 2, "key_head_dim": 64, "value_head_dim": 64}
LATENT = {"n_heads": 2, "kv_rank": 64, "nope_dim": 64, "rope_dim": 32, "value_dim": 64, "position": ROTARY}
MODELS: dict[str, dict[str, Any]] = {
    "attention": {"type": "attention", "position": ROTARY, **HEADS},
    "mamba2": {"type": "mamba2", **MAMBA},
    "zamba2": {"type": "mamba2", **MAMBA},
    "gdn": {"type": "gated_deltanet", **DELTA},
    "kda": {"type": "kimi_delta", **DELTA},
    "mamba3": {"type": "mamba3", **MAMBA},
    "cca": {"type": "compressed_attention", "n_kv_heads": 1, "position": ROTARY, **HEADS},
    "mla": {"type": "latent_attention", **LATENT},
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=positive, default=[64, 128, 256, 512])
    parser.add_argument("--steps", type=positive, default=1500)
    parser.add_argument(
        "--seconds", type=number, default=50.0, help="of each model at most, behind a step of each length"
    )
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--lr", type=number, default=2e-3)
    parser.add_argument("--backend", choices=("auto", "reference"), default="auto", help="of the kernels, all in fp32")
    args = parser.parse(argv)
    found: dict[str, Any] = {}
    for name in args.models:
        found[name] = rounded(recall(name, args))
        content = {"device": device_name(), "settings": {**vars(args), "out": str(args.out)}, "models": found}
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "recall.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
        print(f"{name}: {found[name]}", flush=True)
    return 0


def recall(name: str, args: Any) -> dict[str, Any]:
    """Train a model, and ask it. accuracy: by length."""
    import torch

    from llmtrain.kernels import platform
    from llmtrain.models.causal_lm import CausalLM
    from llmtrain.models.config import ModelConfig
    from llmtrain.models.hybrid import HybridLM

    device, mlp = "cuda" if torch.cuda.is_available() else "cpu", {"type": "swiglu", "d_ff": 2 * WIDTH}
    blocks, layers = {"x": MODELS[name] | {"mlp": mlp}}, "x*2"
    if name == "zamba2":
        blocks["s"] = {"type": "shared_attention", "n_heads": 2, "position": ROTARY, "mlp": mlp | {"type": "geglu"}}
        layers = "x s+x"
    config = ModelConfig.model_validate({"vocab_size": WORDS, "d_model": WIDTH, "blocks": blocks, "layers": layers})
    if args.backend != "auto":
        config = config.with_backends("auto", lambda _: args.backend)
    model = CausalLM(HybridLM(config, platform.detect(), torch.float32)).to(device)
    model.hybrid.init_weights(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    generator, began, step = torch.Generator(device).manual_seed(1), time.monotonic(), 0
    while step < args.steps and (step < len(args.lengths) or time.monotonic() - began < args.seconds):
        if step == len(args.lengths):  # kernels are compiled
            began = time.monotonic()
        loss = model.loss(*draw(args.batch, args.lengths[step % len(args.lengths)], generator)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
    seconds, accuracy = time.monotonic() - began, {}
    for length in [*args.lengths, 2 * max(args.lengths)]:
        ids, labels = draw(args.batch, length, generator)
        with torch.no_grad():
            right = model.logits(ids).argmax(-1) == labels
        accuracy[str(length)] = float(right[labels >= 0].float().mean())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "steps": step, "seconds": seconds, "accuracy": accuracy}


def draw(batch: int, length: int, generator: Any) -> tuple[Any, Any]:
    """Token ids and labels [batch, length], -100 but at the keys that come again: at places of their own behind all pairs."""
    import torch

    pairs, quarter, on = max(length // 8, 1), WORDS // 4, {"generator": generator, "device": generator.device}
    keys = torch.rand(batch, quarter, **on).argsort(1)[:, :pairs]
    pairs = keys.shape[1]
    values = torch.randint(quarter, 2 * quarter, (batch, pairs), **on)
    ids = torch.randint(2 * quarter, WORDS, (batch, length), **on)
    ids[:, : 2 * pairs] = torch.stack([keys, values], -1).flatten(1)
    places = 2 * pairs + torch.rand(batch, length - 2 * pairs, **on).argsort(1)[:, :pairs]
    labels = torch.full_like(ids, -100).scatter_(1, places, values)
    return ids.scatter_(1, places, keys), labels
