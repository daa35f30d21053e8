"""Measuring generation by llmtrain and by transformers, for benchmarks/decoding.py."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.report import device_name
from llmtrain.generate.decoding import DecodeStep, decode
from llmtrain.generate.sampling import Sampling
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import family_for_model
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config

Request = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, new tokens) -> the new tokens of every row."""


def run(config: Config, args: argparse.Namespace) -> None:
    """Print the figures of one model. args: those of benchmarks/decoding.py."""
    model = build(config.model)
    print(f"{config.name}, {sum(p.numel() for p in model.parameters()):,} parameters, {device_name()}", flush=True)
    if args.curve:
        curve(config.name, model, args.curve)
    peer = None if args.no_peer else build_peer(model)
    for batch in args.batch:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(config.model.vocab_size, (batch, args.prompt), generator=generator).tolist()
        ours = measure(llmtrain_request(model), prompts, args.new, args.repeats)
        print(f"batch {batch:3}  llmtrain      {ours}", flush=True)
        if peer is None:
            continue
        theirs = measure(transformers_request(peer), prompts, args.new, args.peer_repeats)
        print(f"batch {batch:3}  transformers  {theirs}", flush=True)
        print(
            f"batch {batch:3}  llmtrain / transformers: whole request {ours.whole / theirs.whole:.2f} x, "
            f"decoding {ours.decoding / theirs.decoding:.2f} x",
            flush=True,
        )


def build(config: ModelConfig) -> CausalLM:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = HybridLM(config, dtype=dtype)
    model.to_empty(device=device)
    model.init_weights(0)
    return CausalLM(model.cast(dtype)).eval()


def build_peer(model: CausalLM) -> torch.nn.Module:
    """The model of transformers with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family = family_for_model(model.config)
    published = family.write_config(model.config)
    config = AutoConfig.for_model(**{"model_type": family.model_type} | published)
    parameters = dict(model.hybrid.named_parameters())
    weights = {
        name: tensor
        for weight in family.weights(model.config)
        for name, tensor in weight.split(parameters[weight.ours].detach()).items()
    }
    device = model.device
    with device:
        peer = AutoModelForCausalLM.from_config(config, dtype=model.hybrid.embed.weight.dtype)
    own = peer.state_dict()
    absent = weights.keys() - own.keys()
    assert not absent, f"transformers has no {sorted(absent)[:3]}"
    peer.load_state_dict(weights, strict=False, assign=False)
    peer.tie_weights()
    return peer.to(device).eval()


class Speed:
    """Median seconds of a request, and of the same request for one new token (first)."""

    def __init__(self, tokens: int, new: int, seconds: float, first: float, group: int | None):
        self.seconds, self.first, self.group = seconds, first, group
        self.whole = tokens / seconds
        self.decoding = tokens * (new - 1) / new / (seconds - first)
        self.per_step = (seconds - first) / (new - 1)

    def __str__(self) -> str:
        groups = f"  (out of memory as one batch: in groups of {self.group})" if self.group else ""
        return (
            f"{self.seconds:8.3f} s, {self.whole:9,.1f} tokens/s; first token after {self.first:7.3f} s, "
            f"then {self.decoding:9,.1f} tokens/s, {1000 * self.per_step:7.2f} ms per step{groups}"
        )


def measure(request: Request, prompts: list[list[int]], new: int, repeats: int) -> Speed:
    size = len(prompts)
    while True:
        groups = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        try:
            request(groups[0], 8)  # warm up, and find out whether it fits
            break
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            if size == 1:
                raise
            size //= 2
    print(f"    {len(prompts)} prompts fit in batches of {size}", flush=True)

    def seconds(count: int) -> float:
        found = []
        for _ in range(repeats):
            began = clock()
            for group in groups:
                answers = request(group, count)
                assert all(len(answer) == count for answer in answers)
            found.append(clock() - began)
        return statistics.median(found)

    whole = seconds(new)
    print(f"    {whole:.3f} s for {new} new tokens each", flush=True)  # in case a time limit ends the rest
    return Speed(len(prompts) * new, new, whole, seconds(1), group=None if size == len(prompts) else size)


def llmtrain_request(model: CausalLM) -> Request:
    def request(prompts: list[list[int]], new: int) -> list[list[int]]:
        steps = list(decode(model, prompts, Sampling(temperature=0), max_new_tokens=new))
        return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]

    return request


def transformers_request(peer) -> Request:
    def request(prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=peer.device)
        with torch.no_grad():
            out = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].tolist()

    return request


def curve(name: str, model: CausalLM, png: str, steps: int = 32) -> None:
    """Measure and draw the time of one more token over the number of tokens in the cache."""
    on_gpu = model.device.type == "cuda"
    lengths = [2**n for n in range(10, 18 if on_gpu else 15)]
    times = []
    for length in lengths:
        cache = model.empty_cache(1, length + steps + 8)
        cache.advance(length)
        step = DecodeStep(model, cache, steps)
        tokens = torch.zeros(1, dtype=torch.int64, device=cache.next.device)
        with torch.no_grad():
            for _ in range(4):
                step(tokens)
            began = clock()
            for _ in range(steps):
                step(tokens)
            times.append(1000 * (clock() - began) / steps)
        print(f"{name}: {length:7,} tokens before, {times[-1]:.3f} ms per token", flush=True)
    device = device_name()
    draw({"name": name, "device": device, "tokens": lengths, "ms": times}, Path(png))


def draw(new: dict[str, Any], png: Path) -> None:
    """Add a model's curve to those in the JSON file beside the picture, and draw all of them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figures = png.with_suffix(".json")
    curves = json.loads(figures.read_text()) if figures.exists() else []
    curves = [*(curve for curve in curves if curve["name"] != new["name"]), new]
    figures.write_text("[\n" + ",\n".join(json.dumps(curve) for curve in curves) + "\n]\n")
    figure, axes = plt.subplots(figsize=(7.5, 4.2), constrained_layout=True)
    for curve in curves:
        axes.plot(curve["tokens"], curve["ms"], "o-", markersize=4, label=curve["name"])
    axes.set(xlabel="tokens read before", ylabel="ms per token, batch 1", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"Cached decoding, bf16, {curves[0]['device']}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:.0f} Ki")
    axes.set_xticks(
        [2**14 * n for n in range(9)] if max(max(curve["tokens"]) for curve in curves) > 2**16 else axes.get_xticks()
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(png, dpi=120)
    plt.close(figure)


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
