"""Seconds that a step of several ranks gains by CUDA graphs, by rough figures; for `train.cuda_graphs: auto`. No torch here."""

from llmtrain.kernels.platform import Platform
from llmtrain.schema.config import Config
from llmtrain.schema.training import TrainConfig

HOST_SECONDS = 2e-3
"""Of launching a layer's forward and backward pass without graphs: 1.6 ms with attention, 3 ms with Mamba-2 (BENCHMARKS.md)."""
KERNEL_FLOPS = 4e14
"""A second, of a GPU at work; on a slower one graphs gain less than reckoned, and are still right."""
FSDP_OVERHEAD = 0.04
"""Share of a microbatch's kernels that FSDP2 adds where the GPU does not wait for the host: MPT-125M on two H200s, 5 %."""
EXCHANGED_BYTES = 6
"""For each parameter: weights in bf16 and gradients in fp32, which without graphs travel beside layers, and with them apart."""
BANDWIDTH = {True: 3e11, False: 3e10}
"""Bytes a second between GPUs, of one node and of several."""


def gained(parameters: int, layers: int, microbatches: int, tokens: int, ranks: int, one_node: bool) -> float:
    """Seconds of a step; negative: what it loses. microbatches: of a rank's step. tokens: of each."""
    kernels = 6 * parameters * tokens / KERNEL_FLOPS
    each = max(layers * HOST_SECONDS - kernels, FSDP_OVERHEAD * kernels)
    exchanged = EXCHANGED_BYTES * parameters * (ranks - 1) / ranks
    return microbatches * each - exchanged / BANDWIDTH[one_node]


def gained_by_run(config: Config, parameters: int, ranks: int, one_node: bool) -> float:
    """Seconds of a step that the run of this config gains; the config without `auto`."""
    tokens = config.microbatch_tokens(config.train.least_microbatch)
    return gained(parameters, len(config.model.layer_list()), config.grad_accum(ranks), tokens, ranks, one_node)


def takes_graphs(config: Config, parameters: int, ranks: int, one_node: bool) -> bool:
    """True if a run of several NVIDIA GPUs is expected to make graphs. The config without `auto` but of graphs."""
    nvidia = Platform("nvidia", "", "", 0)
    return reason_against(config, nvidia, parameters, ranks, one_node) is None


def reason_against(config: Config, platform: Platform, parameters: int, ranks: int, one_node: bool) -> str | None:
    """Reason for which a run makes no graphs; None: it does, if it can. config: without `auto` but of graphs."""
    setting = config.train.cuda_graphs
    if setting == "off":
        return "train.cuda_graphs is off"
    reason = refusal(config.train, ranks, platform, config.draws_in_training) or config.objective.cuda_graphs_refusal
    if reason is None and ranks > 1 and config.model.counts_over_ranks:
        return "loads of experts are summed over the ranks within a microbatch (balance.tokens: step)"
    if reason is None and ranks > 1 and setting == "auto" and gained_by_run(config, parameters, ranks, one_node) <= 0:
        return f"{ranks} ranks would exchange weights and gradients apart from microbatches that are few and long"
    return reason


def refusal(config: TrainConfig, ranks: int, platform: Platform, draws: bool) -> str | None:
    """Reason for which there can be no graphs, or with `auto` shall be none; None: there can."""
    if platform.vendor == "cpu":
        return "they need a GPU"
    if reason := config.cuda_graphs_refusal(ranks, draws):
        return reason
    if platform.vendor == "amd" and config.cuda_graphs == "auto":
        return "they were not tried on AMD (train.cuda_graphs: on takes them)"
    return None
