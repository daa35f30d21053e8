"""`llmtrain describe` as tables for a terminal of 80 to 100 columns."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llmtrain.flops.units import binary, decimal, duration, share, significant
from llmtrain.plan.describe import Description
from llmtrain.plan.memory import host_bytes
from llmtrain.plan.meshes import AtRate
from llmtrain.plan.parameters import Float8Description
from llmtrain.plan.scaling import Scale
from llmtrain.schema.config import Config
from llmtrain.start import cost_of_start


def print_description(description: Description, config: Config, points: Sequence[Scale] = ()) -> None:
    """Prints every part; what is estimated or assumed says so. points: predictions of `describe --nodes`, one of which is the
    description's speed."""
    console = _console()
    d, model = description, config.model
    console.print(f"[bold]{d.name}[/]  {d.n_layers} layers: {d.layers}", soft_wrap=True)
    for name, block in model.blocks.items():
        console.print(f"  {name} = {block.describe(model.d_model)}{block.describe_wiring(model.d_model, model.norm)}")
    width = f"d_model {model.d_model}, vocabulary {model.vocab_size}, "
    multipliers = {"embedding": model.embedding_multiplier, "logits": model.logit_multiplier}
    width += "".join(f"{name} x {value:g}, " for name, value in multipliers.items() if value != 1)
    console.print(f"  {width}{'tied' if model.tie_embeddings else 'untied'} head, sequences of {config.data.seq_len}")
    console.print(f"  {_export(d)}\n", soft_wrap=True)
    console.print(_parameters(d))
    _note(console, "active: parameters a token passes through; a shared block's once per use, of experts those chosen.")
    if d.parameter_groups:
        console.print(_groups(d))
        _note(console, "Where several entries match, each setting is that of the last entry which gives it.")
    if d.by_matrix is not None:
        m = d.by_matrix
        console.print(
            f"[bold]{config.optimizer.title}[/]: {m.matrices:,} matrices ({m.maps:,} linear maps), {m.parameters:,} parameters; "
            f"{m.other_parameters:,} by AdamW: {escape(', '.join([*m.others, 'vectors']))}\n"
        )
    if d.float8 is not None:
        products = f"{share(d.float8.share)} of the products of linear layers" + " and experts" * d.float8.experts
        console.print(f"[bold]float8 ({d.float8.recipe}): {products}[/]", soft_wrap=True)
        if d.float8.left_out:
            console.print(_float8(d.float8))
        if d.float8.refused is not None:
            console.print(f"[bold]{d.float8.refused}: a run there is refused[/]; train.float8=null", soft_wrap=True)
        _note(console, "MFU stays a share of the bf16 peak, so it compares with that of a run in bf16.")
    console.print(_flops(d))
    _note(
        console,
        f"training: {_training(d)}. foundry: 6 N + 12 L d T as in LLM Foundry, with N = active parameters "
        "(embeddings too) and whole T x T squares. causal: what the mathematics needs: half squares, free look-ups."
        + (" scan: a recurrence, token by token, in both." if d.forward_full["scan"] else ""),
    )
    console.print(_memory(d, config))
    if d.stages:
        console.print(_stages(d))
    for line in d.resolved:
        _note(console, line)
    console.print(_decided(d))
    for fit in d.fits:
        _note(console, f"Would fit, with {binary(fit.memory.total)}: {' '.join(fit.settings)} ({fit.price}).")
    _note(
        console,
        "Activations are an estimate for compiled layers with fused attention; compare with the peak that training "
        "logs (memory/peak_allocated_gib). The formulas are in llmtrain/plan/memory.py.",
    )
    console.print(_run(d, config, points))
    if d.schedule is not None:
        console.print(f"learning rate: {d.schedule}")
    console.print(f"start: {cost_of_start(Path(config.run_dir))}", soft_wrap=True)
    if d.speed is None:
        _note(console, "For expected tokens/s and time: --gpu h200 [--mfu 0.5] [--world-size N], or train.peak_tflops")


def print_scaling(points: Sequence[Scale]) -> None:
    """Prints predictions of `describe --nodes`."""
    console = _console()
    bubbles = ["bubble"] if any(point.bubble for point in points) else []
    table = _table("Predicted", "GPUs", "sharding", "step", "exposed", *bubbles, "kept", "tokens/s", "memory")
    for point in points:
        table.add_row(
            f"{point.gpus:,}",
            *_step(point),
            *[share(point.bubble / point.step_seconds, 1) for _ in bubbles],
            share(point.kept),
            *_speed_and_memory(point),
        )
    console.print(table)
    _note(
        console,
        "Each GPU has the same work. Computed from the assumed MFU of one GPU and stated bandwidths (plan/scaling.py). "
        "Predictions for two and four GPUs of a node were 5 % too low to 5 % too high; nothing beyond one is measured.",
    )


def _step(point: Scale) -> tuple[str, str, str]:
    return point.sharding, duration(point.step_seconds), duration(point.exposed) if point.exposed else "0"


def _speed_and_memory(point: Scale) -> tuple[str, str]:
    size = binary(point.memory)
    return decimal(point.tokens_per_second, ""), size if point.fits else f"[red]{size}, too much[/]"


def print_meshes(found: Mapping[int, Scale]) -> None:
    """Prints predictions for one number of GPUs by the number of stages of a pipeline, where there are several."""
    if len(found) < 2:
        return
    console = _console()
    table = _table("Stages", "train.parallel.pipeline", "sharding", "step", "exposed", "bubble", "tokens/s", "memory")
    for stages, point in found.items():
        bubble = share(point.bubble / point.step_seconds, 1)
        table.add_row(str(stages), *_step(point), bubble, *_speed_and_memory(point))
    console.print(table)
    best = max(
        (stages for stages in found if found[stages].fits), key=lambda n: found[n].tokens_per_second, default=None
    )
    if best is None:
        text = "None of them fits."
    elif best == 1:
        text = "Stages do not pay here, by this prediction."
    else:
        gain = (
            f" {share(found[best].tokens_per_second / found[1].tokens_per_second - 1)} more tokens/s"
            if 1 in found
            else ""
        )
        fits = "" if 1 not in found or found[1].fits else ", and without stages it does not fit"
        text = f"Stages pay here, by this prediction: train.parallel.pipeline={best}{gain and ','}{gain}{fits}."
    _note(
        console,
        f"{text} More microbatches (a larger batch, or a smaller train.microbatch_size) make the bubble smaller.",
    )


def print_links(found: Sequence[AtRate]) -> None:
    """Prints the fastest meshes over networks of several rates."""
    if not found:
        return
    console = _console()
    table = _table("Fastest meshes", "Gbit/s per GPU", "tokens/s", "without stages", "tokens/s", "with stages")
    for one in found:
        of_both = [
            (decimal(best.scale.tokens_per_second, ""), best.mesh) if best else ("", "none fits")
            for best in (one.without, one.with_stages)
        ]
        table.add_row(f"{one.link * 8 / 1e9:g}", *(text for some in of_both for text in some))
    console.print(table)


def _console() -> Console:
    return Console(width=min(100, shutil.get_terminal_size((100, 24)).columns), highlight=False)


def _export(d: Description) -> str:
    if d.exports_as:
        return f"`llmtrain export` writes it as {d.exports_as}"
    # A dotted path ends before ' = '.
    paths = [reason.split(": ", 1)[1].split(" = ")[0] for reason in d.not_exported if _nearest(d) in reason]
    return f"`llmtrain export` cannot write it: {_nearest(d)} differs in {', '.join(paths)}"


def _nearest(d: Description) -> str:
    return d.not_exported[0].split(":")[0]


def _training(d: Description) -> str:
    if d.trained_parameters == d.total_parameters:
        return "three times forward"
    return (
        "forward, and the gradients of activations and of trained weights: 4 rather than 6 for a frozen parameter; in the causal "
        "count 2 below the first layer with a trained one"
    )


def _gpus(d: Description) -> str:
    return f"{d.world_size} GPU{'s' if d.world_size > 1 else ''}"


def _note(console: Console, text: str) -> None:
    console.print(text + "\n", style="dim", markup=False)


def _parameters(d: Description) -> Table:
    table = _table("Parameters", "", "", "")
    for row in d.components:
        times = f" x {row.copies}" if row.copies > 1 else ""
        used = f", used {row.uses} times" if row.uses != row.copies else ""
        table.add_row(f"{row.name}{times}{used}", f"{row.parameters:,}", share(row.parameters / d.total_parameters, 1))
    table.add_section()
    table.add_row("total", f"{d.total_parameters:,}", "")
    table.add_row("active", f"{d.active_parameters:,}", "")
    if d.trained_parameters != d.total_parameters:
        table.add_row("trained", f"{d.trained_parameters:,}", share(d.trained_parameters / d.total_parameters, 1))
    return table


def _groups(d: Description) -> Table:
    table = _table("Parameter groups", "optimizer.groups", "parameters", "tensors", "peak lr", "weight decay")
    for group in d.parameter_groups:
        row = (f"{group.parameters:,}", f"{group.tensors:,}", f"{group.lr:.3g}", f"{group.weight_decay:.3g}")
        table.add_row(escape(", ".join(group.matched)) or "(none)", *row)
    return table


def _decided(d: Description) -> Table:
    """docs/auto.md says how each is decided."""
    table = _table(f"Decided, for {d.device}", "", "")
    for setting, value in d.decided.items():
        table.add_row(setting, str(value).lower() if isinstance(value, bool) else str(value))
    return table


def _float8(float8: Float8Description) -> Table:
    table = _table("left in bf16", "", "")
    for layers, reason in float8.left_out:
        table.add_row(escape(layers), reason)
    return table


def _flops(d: Description) -> Table:
    table = _table("FLOP per token", "", "full squares", "causal")

    def add(name: str, full: float, causal: float) -> None:
        table.add_row(name, decimal(full, "FLOP"), decimal(causal, "FLOP"))

    for kind, full in d.forward_full.items():
        if full:
            add(kind, full, d.forward_causal[kind])
    table.add_section()
    add("forward", sum(d.forward_full.values()), sum(d.forward_causal.values()))
    add("training (foundry | causal)", d.training_foundry, d.training_causal)
    return table


def _memory(d: Description, config: Config) -> Table:
    train = config.train
    shared = f" / {train.parallel.of_stage}" if train.parallel.of_stage > 1 else ""
    divided = "".join(f", {name} {n}" for name in ("tensor", "expert") if (n := getattr(train.parallel, name)) > 1)
    of_stage = " of the stage that takes the most" if d.stages else ""
    table = _table(f"Memory per GPU{of_stage}, {_gpus(d)}", "", "", "of GPU" if d.gpu_memory else "")
    rows = {
        f"weights ({train.precision}, {d.sharding} sharding over {d.shard_ranks}{divided})": d.memory.weights,
        "gradients": d.memory.gradients,
        f"optimizer ({config.optimizer.title}{', in host memory' if d.host_state else ''})": d.memory.optimizer,
        **({"moving average of the weights": d.memory.average} if train.ema else {}),
        f"activations, estimated (microbatch {d.microbatch_size} x {config.data.seq_len}{shared}, "
        f"checkpointing {d.checkpointing})": d.memory.activations,
        f"logits and loss ({'plain' if train.loss.type == 'plain' else 'chunked'})": d.memory.loss,
    }
    if (rollout := config.objective.own_rollout) is not None:
        copied = d.decided.get("objective.rollout.weights", rollout.weights) == "copied"
        rows[f"rollouts ({rollout.rows} rows{', a copy of the weights' if copied else ''})"] = d.memory.rollouts
    for name, size in rows.items():
        table.add_row(name, binary(size), share(size / d.gpu_memory) if d.gpu_memory else "")
    table.add_section()
    table.add_row("together", binary(d.memory_total), share(d.memory_total / d.gpu_memory) if d.gpu_memory else "")
    if d.gpu_memory and d.memory_total > d.gpu_memory:
        table.add_row("[red]more than the GPU has[/]", binary(d.gpu_memory), "")
    if d.host_state:
        table.add_row("host memory of a rank, for the optimizer's state", binary(d.host_state), "")
    if of_host := host_bytes(config):
        table.add_row("host memory of a rank, for inputs of recomputed layers", binary(of_host), "")
    return table


def _stages(d: Description) -> Table:
    table = _table("Stages", "layers", "FLOPs", "parameters", "memory per GPU")
    for stage in d.stages:
        layers = ", ".join(f"{a} to {b - 1}" if b - a > 1 else str(a) for a, b in stage.spans)
        size = binary(stage.memory)
        too_much = d.gpu_memory is not None and stage.memory > d.gpu_memory
        row = (share(stage.share, 1), f"{stage.parameters:,}", f"[red]{size}, too much[/]" if too_much else size)
        table.add_row(layers, *row)
    return table


def _run(d: Description, config: Config, points: Sequence[Scale]) -> Table:
    table = _table("Run", "", "")
    length = f"{d.steps:,}" if d.steps is not None else f"{config.train.duration}; steps depend on the data"
    table.add_row("steps", length)
    table.add_row("tokens per step", f"{d.tokens_per_step:,}")
    parallel = config.train.parallel
    sent = (
        (d.gathered, parallel.context, "sequences"),
        (d.exchanged, parallel.tensor, "layers"),
        (d.routed, parallel.expert, ""),
    )
    for size, ranks, of in sent:
        if size:
            verb, end = ("share", f"its {of}") if of else ("hold", "other experts, with a balanced router")
            others = f"{ranks - 1} GPU{'s' * (ranks > 2)} that {verb}{'s' * (ranks == 2)} {end}"
            table.add_row("received per microbatch and forward pass", f"{binary(size)} from {others}")
    if d.tokens is not None:
        table.add_row("tokens", f"{d.tokens:,} ({significant(d.tokens / d.total_parameters, 3)} per parameter)")
    if d.speed is not None:
        speed = d.speed
        peak = f"{significant(speed.peak_flops / 1e12, 4)} TFLOP/s, {speed.gpu}"
        table.add_section()
        note = "" if speed.peak_source == speed.gpu else f" ({speed.peak_source})"
        table.add_row("assumed", f"{share(speed.mfu)} MFU (foundry) of {peak}{note}{', alone' if len(points) else ''}")
        table.add_row("tokens/s/GPU", significant(speed.tokens_per_second_per_gpu, 3))
        table.add_row("time per step", duration(speed.seconds_per_step))
        if speed.days is not None:
            table.add_row(f"time on {_gpus(d)}", duration(86_400 * speed.days))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    table.show_header = any(columns)  # a row of blanks says nothing
    return table
