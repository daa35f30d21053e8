"""`llmtrain describe` as tables for a terminal of 80 to 100 columns."""

from __future__ import annotations

import shutil

from rich.console import Console
from rich.table import Table

from llmtrain.flops.describe import Description
from llmtrain.schema.config import Config

GIB = 2**30


def print_description(description: Description, config: Config, console: Console | None = None) -> None:
    """Prints every part; what is estimated or assumed says so."""
    console = console or Console(width=min(100, shutil.get_terminal_size((100, 24)).columns), highlight=False)
    d, model = description, config.model
    console.print(f"[bold]{d.name}[/]  {d.n_layers} layers: {d.layers}", soft_wrap=True)
    for name, block in model.blocks.items():
        mlp = f"; {block.mlp.type} MLP {block.mlp.d_ff}" if block.mlp else ""
        console.print(f"  {name} = {block.describe(model.d_model)}{mlp}")
    width = f"d_model {model.d_model}, vocabulary {model.vocab_size}, "
    console.print(f"  {width}{'tied' if model.tie_embeddings else 'untied'} head, sequences of {config.data.seq_len}")
    console.print(f"  {_export(d)}\n", soft_wrap=True)
    console.print(_parameters(d))
    _note(console, "active: parameters a token passes through; those of a shared block count once per use.")
    console.print(_flops(d))
    _note(
        console,
        "training: three times forward. foundry: 6 N + 12 L d T as in LLM Foundry, with N = active parameters "
        "(embeddings too) and whole T x T squares. causal: what the mathematics needs: half squares, free look-ups.",
    )
    console.print(_memory(d, config))
    _note(
        console,
        "Activations are an estimate for compiled layers with fused attention; compare with the peak that training "
        "logs (memory/peak_allocated_gib). The formulas are in llmtrain/flops/memory.py.",
    )
    console.print(_run(d, config))
    if d.speed is None:
        _note(console, "For expected tokens/s and days: --gpu h200 [--mfu 0.5] [--world-size N]")


def _export(d: Description) -> str:
    if d.exports_as:
        return f"`llmtrain export` writes it as {d.exports_as}"
    # A dotted path ends before ' = '.
    paths = [reason.split(": ", 1)[1].split(" = ")[0] for reason in d.not_exported if _nearest(d) in reason]
    return f"`llmtrain export` cannot write it: {_nearest(d)} differs in {', '.join(paths)}"


def _nearest(d: Description) -> str:
    return d.not_exported[0].split(":")[0]


def _gpus(d: Description) -> str:
    return f"{d.world_size} GPU{'s' if d.world_size > 1 else ''}"


def _note(console: Console, text: str) -> None:
    console.print(text + "\n", style="dim", markup=False)


def _parameters(d: Description) -> Table:
    table = _table("Parameters", "", "", "")
    for row in d.components:
        times = f" x {row.copies}" if row.copies > 1 else ""
        used = f", used {row.uses} times" if row.uses != row.copies else ""
        table.add_row(f"{row.name}{times}{used}", f"{row.parameters:,}", f"{row.parameters / d.total_parameters:.1%}")
    table.add_section()
    table.add_row("total", f"{d.total_parameters:,}", "")
    table.add_row("active", f"{d.active_parameters:,}", "")
    return table


def _flops(d: Description) -> Table:
    table = _table("GFLOP per token", "", "full squares", "causal")
    for kind, full in d.forward_full.items():
        if full:
            table.add_row(kind, f"{full / 1e9:,.3f}", f"{d.forward_causal[kind] / 1e9:,.3f}")
    table.add_section()
    full, causal = sum(d.forward_full.values()), sum(d.forward_causal.values())
    table.add_row("forward", f"{full / 1e9:,.3f}", f"{causal / 1e9:,.3f}")
    table.add_row("training (foundry | causal)", f"{d.training_foundry / 1e9:,.3f}", f"{d.training_causal / 1e9:,.3f}")
    return table


def _memory(d: Description, config: Config) -> Table:
    train = config.train
    table = _table(f"Memory per GPU, {_gpus(d)}", "", "GiB", "of GPU" if d.gpu_memory else "")
    rows = {
        f"weights ({train.precision}, {train.sharding.strategy} sharding over {d.shard_ranks})": d.memory.weights,
        "gradients": d.memory.gradients,
        f"optimizer ({config.optimizer.title})": d.memory.optimizer,
        f"activations, estimated (microbatch {train.microbatch_size} x {config.data.seq_len}, "
        f"checkpointing {train.activation_checkpointing.type})": d.memory.activations,
        f"logits and loss ({'plain' if train.loss.type == 'plain' else 'chunked'})": d.memory.loss,
    }
    for name, size in rows.items():
        table.add_row(name, f"{size / GIB:,.2f}", f"{size / d.gpu_memory:.0%}" if d.gpu_memory else "")
    table.add_section()
    share = f"{d.memory_total / d.gpu_memory:.0%}" if d.gpu_memory else ""
    table.add_row("together", f"{d.memory_total / GIB:,.2f}", share)
    if d.gpu_memory and d.memory_total > d.gpu_memory:
        table.add_row("[red]more than the GPU has[/]", f"{d.gpu_memory / GIB:,.0f}", "")
    return table


def _run(d: Description, config: Config) -> Table:
    table = _table("Run", "", "")
    length = f"{d.steps:,}" if d.steps is not None else f"{config.train.duration}; steps depend on the data"
    table.add_row("steps", length)
    table.add_row("tokens per step", f"{d.tokens_per_step:,}")
    if d.tokens is not None:
        table.add_row("tokens", f"{d.tokens:,} ({d.tokens / d.total_parameters:.1f} per parameter)")
    if d.speed is not None:
        speed, peak = d.speed, f"{d.speed.peak_flops / 1e12:,.1f} TFLOP/s"
        table.add_section()
        table.add_row("assumed", f"{speed.mfu:.0%} MFU (foundry) of {peak}, {speed.gpu}")
        table.add_row("tokens/s/GPU", f"{speed.tokens_per_second_per_gpu:,.0f}")
        table.add_row("seconds per step", f"{speed.seconds_per_step:,.2f}")
        if speed.days is not None:
            table.add_row(f"days on {_gpus(d)}", f"{speed.days:,.2f}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    table.show_header = any(columns)  # a row of blanks says nothing
    return table
