"""Generation speed beside transformers' own `generate`, on the same weights, in the same process.

    python -m benchmarks decoding FILE [a.b=c …] [--batch 1 64] [--prompt 1800] [--new 120] [--curve PNG]

Random weights and prompts, bf16 on a GPU, greedy, no early end. Two figures each: new tokens per second of the whole
request, and of the decoding after the prompts are read (the whole, less a request of one new token). A peer that runs
out of memory is given the same prompts in smaller groups, one after another (`group_count`).

--curve adds milliseconds per token over the length of the text read before to a picture and the figures in PNG.json
(zeros in the caches: the work is the same).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.arguments import Parser, natural, positive
from benchmarks.harness.pictures import picture
from benchmarks.harness.report import Report, device_name
from llmtrain.schema.load import load_config

if TYPE_CHECKING:
    from torch import nn

    from llmtrain.models.causal_lm import CausalLM
    from llmtrain.models.config import ModelConfig

Request = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, new tokens) -> the new tokens of every row."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__name__, __doc__, config=True, out=True)
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=positive, default=1800)
    parser.add_argument("--new", type=positive, default=120, help="at least two")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--peer-repeats", type=natural, default=1, help="0: llmtrain alone")
    parser.add_argument("--curve", type=Path, metavar="PNG")
    args = parser.parse(argv)
    if args.new < 2:
        parser.error(f"--new {args.new}: a request for one token is subtracted from it")
    import torch

    config = load_config(args.file, args.overrides)
    model, report = build(config.model), Report(args.out)
    print(f"{config.name}, {sum(p.numel() for p in model.parameters()):,} parameters, {device_name()}", flush=True)
    if args.curve:
        curve(config.name, model, args.curve)
    peer = build_peer(model) if args.peer_repeats else None
    for batch in args.batch:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(config.model.vocab_size, (batch, args.prompt), generator=generator).tolist()
        ours = speed(llmtrain_request(model), prompts, args.new, args.repeats)
        report.add(f"{config.name}, batch {batch}, llmtrain", **ours)
        if peer is not None:
            theirs = speed(transformers_request(peer), prompts, args.new, args.peer_repeats)
            names = {"whole_x": "request_s", "decoding_x": "step_ms"}
            ratios = {name: theirs[figure] / ours[figure] for name, figure in names.items()}
            report.add(f"{config.name}, batch {batch}, transformers", **theirs, **ratios)


def build(config: ModelConfig) -> CausalLM:
    import torch

    from benchmarks.harness.models import random_model
    from llmtrain.models.causal_lm import CausalLM

    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return CausalLM(random_model(config, dtype).cast(dtype)).eval()


def build_peer(model: CausalLM) -> nn.Module:
    """The model of transformers with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.harness.models import published_tensors
    from llmtrain.models.hf.family import family_for_model

    family = family_for_model(model.config)
    config = AutoConfig.for_model(**{"model_type": family.model_type} | family.write_config(model.config))
    weights, device = published_tensors(model.hybrid), model.device
    with device:
        peer = AutoModelForCausalLM.from_config(config, dtype=model.hybrid.embed.weight.dtype)
    own = peer.state_dict()
    absent = weights.keys() - own.keys()
    assert not absent, f"transformers has no {sorted(absent)[:3]}"
    peer.load_state_dict(weights, strict=False, assign=False)
    peer.tie_weights()
    return peer.to(device).eval()


def speed(request: Request, prompts: list[list[int]], new: int, repeats: int) -> dict[str, Any]:
    """Median seconds of a request, and of a step of its decoding: what it takes beyond the same request for one new token.
    group_count: prompts of a batch, where all do not fit the memory."""
    import torch

    from benchmarks.harness.models import clock

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

    def seconds(count: int) -> float:
        found = []
        for _ in range(repeats):
            began = clock()
            for group in groups:
                answers = request(group, count)
                assert all(len(answer) == count for answer in answers)
            found.append(clock() - began)
        return statistics.median(found)

    whole, first = seconds(new), seconds(1)
    figures = {"tokens_per_s": len(prompts) * new / whole, "request_s": whole, "first_s": first}
    group = None if size == len(prompts) else size
    return figures | {"step_ms": 1000 * (whole - first) / (new - 1), "group_count": group}


def llmtrain_request(model: CausalLM) -> Request:
    from llmtrain.generate.decoding import decode
    from llmtrain.generate.sampling import Sampling

    def request(prompts: list[list[int]], new: int) -> list[list[int]]:
        steps = list(decode(model, prompts, Sampling(temperature=0), max_new_tokens=new))
        return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]

    return request


def transformers_request(peer: Any) -> Request:
    import torch

    def request(prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=peer.device)
        options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        with torch.no_grad():
            out = peer.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[:, ids.shape[1] :].tolist()

    return request


def curve(name: str, model: CausalLM, png: Path, steps: int = 32) -> None:
    """Measure and draw the time of one more token over the number of tokens in the cache."""
    import torch

    from benchmarks.harness.models import clock
    from llmtrain.generate.decoding import DecodeStep

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
    draw({"name": name, "device": device_name(), "tokens": lengths, "ms": times}, png)


def draw(new: dict[str, Any], png: Path) -> None:
    """Add a model's curve to those in the JSON file beside the picture, and draw all of them."""
    figures = png.with_suffix(".json")
    curves = json.loads(figures.read_text()) if figures.exists() else []
    curves = [*(curve for curve in curves if curve["name"] != new["name"]), new]
    png.parent.mkdir(parents=True, exist_ok=True)
    figures.write_text("[\n" + ",\n".join(json.dumps(curve) for curve in curves) + "\n]\n")
    with picture(png, size=(7.5, 4.2)) as axes:
        for curve in curves:
            axes.plot(curve["tokens"], curve["ms"], "o-", markersize=4, label=curve["name"])
        axes.set(xlabel="tokens read before", ylabel="ms per token, batch 1", xlim=(0, None), ylim=(0, None))
        axes.set_title(f"Cached decoding, bf16, {curves[0]['device']}")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:.0f} Ki")
        axes.legend(frameon=False)
