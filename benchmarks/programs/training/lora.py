"""LoRA and QLoRA beside peft's: tokens per second and peak memory of training steps, each in a process of its own.

    python -m benchmarks lora yamls/pretrain/llama3-8b.yaml data.seq_len=4096 train.microbatch_size=1 train.global_batch_size=8 \\
        [--rank 16] [--steps 10] [--kinds ours ours:nf4 peft peft:nf4 trl trl:nf4] [--out FILE.json]

Random weights and tokens, bf16, AdamW, adapters of all linear layers but the head. ours: the model, the optimizer and the kernels
of `llmtrain train`. peft: the class of transformers with peft's adapters and SDPA in a plain loop, without padding; with nf4 its
linear layers are bitsandbytes'. trl: the same model by TRL's SFTTrainer. Recomputation as the YAML has it, in peft's of whole
layers. The first kind runs once more at the end.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.arguments import Parser, positive
from benchmarks.harness.ranks import in_process
from benchmarks.harness.report import Report
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

KINDS = ("ours", "ours:nf4", "peft", "peft:nf4", "trl", "trl:nf4")
WARMUP = 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, config=True, out=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS[:4])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--steps", type=positive, default=10, help=f"steps of which the median is taken, after {WARMUP} others"
    )
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)  # in this process, as JSON
    args = parser.parse(argv)
    base = "nf4" if args.kinds[0].endswith("nf4") else "bf16"
    # The weights are random: nothing is read from init_from.
    adapt = f"adapt={{base: {base}, lora: {{rank: {args.rank}}}}}"
    config = load_config(args.file, [*args.overrides, adapt, "init_from=random"])
    if args.in_process:
        print(json.dumps(measure(config, args.kinds[0], args.steps)))
        return 0
    report = Report(args.out)
    for what in [*args.kinds, f"{args.kinds[0]}, again"]:
        options = ["--rank", str(args.rank), "--steps", str(args.steps), "--kinds", what.removesuffix(", again")]
        report.add(what, **in_process("lora", args.file, *args.overrides, *options))
    return 0


def measure(config: Config, kind: str, steps: int) -> dict[str, float]:
    import torch

    from benchmarks.harness.models import clock

    torch.manual_seed(config.seed)
    name, narrow, cuda = kind.partition(":")[0], kind.endswith("nf4"), torch.cuda.is_available()
    if name == "trl":
        train = by_trainer(config, narrow, WARMUP + steps)
    else:
        step = (ours if name == "ours" else plain_loop)(config, narrow)

        def train() -> list[float]:
            seconds = list[float]()
            for _ in range(WARMUP + steps):
                began = clock()
                step()
                seconds.append(clock() - began)
            return seconds

    gc.collect()  # what was replaced while the model was made, as layers by those in 4 bits
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = train()
    found = statistics.median(seconds[WARMUP:])
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
    return {"step_ms": 1e3 * found, "tokens_per_s": config.tokens_per_step / found, "peak_gb": peak}


def batches(config: Config, device: Any) -> list[dict[str, Any]]:
    """The microbatches of one step."""
    import torch

    size = config.train.microbatch_size
    assert isinstance(size, int), "name a number for train.microbatch_size"
    ids = torch.randint(config.model.vocab_size, (config.train.global_batch_size, config.data.seq_len), device=device)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    return [{"input_ids": i, "labels": y} for i, y in zip(ids.split(size), labels.split(size), strict=True)]


def ours(config: Config, narrow: bool) -> Callable[[], None]:
    import torch

    from llmtrain.adapt.base import adaptations
    from llmtrain.distributed.world import initialize, world_from_environment
    from llmtrain.models.slices import local_of
    from llmtrain.objectives.base import compute_loss
    from llmtrain.train.build import build
    from llmtrain.train.step import GradientSync

    device = initialize()
    training = build(config, world_from_environment(), device)
    model, graphs = training.model.hybrid, training.graphs
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.device != device and not parameter.requires_grad:  # it becomes 4 bits
                parameter.data = torch.empty_like(parameter, device=device)
            local_of(parameter).normal_(1.0 if parameter.ndim == 1 else 0.0, 0.02)
    for converter in adaptations(config.adapt):
        converter.begin(model)
    for converter in adaptations(config.adapt):
        converter.finish(model, device)
    sync, parts = GradientSync(training.model, training.config.train.sharding), batches(config, device)

    def step() -> None:
        for number, batch in enumerate(parts, 1):
            if graphs is None or not graphs.microbatches:
                sync.mark(number == len(parts))
            output = graphs(batch) if graphs else compute_loss(training.model, training.objective, batch)
            (output.loss / len(parts)).backward()
        if graphs is not None:
            graphs.hand_over()
        training.optimizer.step()
        training.optimizer.zero_grad()

    return step


def with_adapters(config: Config, narrow: bool, device: str) -> Any:
    """The model as the class of transformers, with peft's adapters; narrow: linear layers in nf4."""
    import peft
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    from llmtrain.models.hf.family import family_for_model

    assert config.adapt is not None and config.adapt.lora is not None
    family = family_for_model(config.model)
    written = AutoConfig.for_model(**family.write_config(config.model))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(written, dtype=torch.bfloat16, attn_implementation="sdpa")
    if narrow:
        import bitsandbytes  # pyright: ignore[reportMissingImports]

        linears = [
            (owner, name, one)
            for owner in model.modules()
            for name, one in owner.named_children()
            if isinstance(one, nn.Linear) and name != "lm_head"
        ]
        for owner, name, one in linears:
            shape = (one.in_features, one.out_features, one.bias is not None)
            with torch.device("meta"):
                made = bitsandbytes.nn.Linear4bit(*shape, torch.bfloat16, quant_type="nf4")
            made.weight = bitsandbytes.nn.Params4bit(one.weight.data, requires_grad=False, quant_type="nf4")
            made.bias = one.bias
            setattr(owner, name, made.to(device))
    sizes: dict[str, Any] = {"r": config.adapt.lora.rank, "lora_alpha": 2 * config.adapt.lora.rank}
    settings = peft.LoraConfig(**sizes, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, settings).train()


def plain_loop(config: Config, narrow: bool) -> Callable[[], None]:
    import torch
    from torch.nn.functional import cross_entropy

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = with_adapters(config, narrow, device)
    if config.train.activation_checkpointing.type not in ("none", "auto"):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, parts = torch.optim.AdamW(trained, fused=device == "cuda"), batches(config, device)

    def step() -> None:
        for batch in parts:
            with torch.autocast(device, torch.bfloat16):
                logits = model(batch["input_ids"], use_cache=False).logits
                loss = cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
            (loss / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_trainer(config: Config, narrow: bool, steps: int) -> Callable[[], list[float]]:
    """Training by TRL's SFTTrainer, with its defaults but for sizes and files, which returns the seconds of each step."""
    import tempfile

    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from benchmarks.harness.models import clock

    cuda, size, times = torch.cuda.is_available(), config.train.microbatch_size, list[float]()
    assert isinstance(size, int), "name a number for train.microbatch_size"

    class Times(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(clock())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(clock())

    rows = [row.tolist() for _ in range(steps) for part in batches(config, "cpu") for row in part["input_ids"]]
    words = WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")
    settings = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=config.train.global_batch_size // size,
        max_steps=steps,
        max_length=config.data.seq_len,
        gradient_checkpointing=config.train.activation_checkpointing.type not in ("none", "auto"),
        bf16=True,
        use_cpu=not cuda,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=with_adapters(config, narrow, "cuda" if cuda else "cpu"),
        args=settings,
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        processing_class=tokenizer,
        callbacks=[Times()],
    )

    def train() -> list[float]:
        trainer.train()
        return [end - begin for begin, end in zip(times[::2], times[1::2], strict=True)]

    return train
