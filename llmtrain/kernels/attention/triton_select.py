"""Choice of launch parameters of the attention kernels, from the tuning tables."""

from llmtrain.kernels import tuning
from llmtrain.kernels.attention.triton_launch import KERNELS, Kernel, Launch, StoredLaunch
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.tuning_table import Row

MIXED, GROUPED = "mixed", "grouped"
LOG2_E = 1.4426950408889634
INTERPRETED = Launch(32, 16, 4, 1)  # small tiles show their edges in small tests


def variant_name(alibi: bool, documents: bool, softcap: bool, window: bool, causal: bool = True) -> str:
    """Variant by its name in tuning tables; see choose()."""
    features = {"alibi": alibi, "documents": documents, "softcap": softcap, "window": window}
    named = "+".join(name for name, here in features.items() if here)
    if not named:  # without causality too: the same loop, without its masks
        return "plain"
    return named if causal else MIXED


def choose(
    kernel: Kernel, head_dim: int, dtype: str, platform: Platform, seq_len: int | None = None,
    variant: str | None = None, grouped: bool = False, values: int | None = None,
) -> Launch:  # fmt: skip
    """Launch parameters of the row that serves this shape.

    seq_len: T, or how far back a query sees, where a window is shorter: as many tiles a program goes through.
    variant: `plain`, what is beyond it (alibi, documents, softcap, window), or several of these, joined by `+` in this order;
    or `mixed`: without causality. None: rows that name no variant. grouped: heads share keys. values: width of values where it is
    not head_dim, for which `VARIANT, values WIDTH` comes before the variant.
    Of the rows for these, the nearest head_dim, then the user's own, then the first: the variant; `documents` for documents
    with a window, which differ from it by two constants; for other sums `mixed`, whose small tiles leave registers for
    everything. For dkdv of grouped heads, whose loop is another, `VARIANT, grouped` before each.
    """
    if platform.vendor == "cpu":
        return INTERPRETED
    names = [variant]
    if variant is not None and "+" in variant:
        names += ["documents"] * (variant == "documents+window") + [MIXED]
    if variant is not None and values is not None:
        names = [of_values(variant, values), *names]
    if grouped and kernel == "dkdv":
        names = [each for name in names for each in (f"{name}, {GROUPED}", name)]

    def select(name: str | None) -> Row:
        return tuning.select(f"attention.{kernel}", dtype, {"head_dim": head_dim}, platform, seq_len, name)

    if len(names) == 1:
        return select(variant).launch
    rows = [(select(name), name) for name in names]
    found = [row for row, name in rows if row.variant == name]
    return min(found, key=lambda row: (row.shape, not tuning.is_own(row, platform)), default=rows[-1][0]).launch


def of_values(variant: str, values: int) -> str:
    """Name of a variant's rows for values of another width than keys."""
    return f"{variant}, values {values}"


def choose_stored(
    head_dim: int, dtype: str, platform: Platform, seq_len: int, variant: str, grouped: bool, values: int | None = None
) -> StoredLaunch | None:
    """Launch parameters of the backward pass by stored gradients of scores, where it was measured to be the faster one."""
    variant = variant if values is None else of_values(variant, values)
    name = f"{variant}, {GROUPED}" if grouped else variant
    row = tuning.exact("attention.dscores", dtype, {"head_dim": head_dim}, platform, name)
    return row.launch if row is not None and seq_len >= row.launch.from_seq_len else None


def takes_any_length(
    head_dim: int, dtype: str, platform: Platform, reach: int, variant: str, grouped: bool, values: int | None
) -> bool:
    """True if every kernel of this shape is one whose tiles TMA loads: the last of a sequence then need not be whole."""
    chosen = (head_dim, dtype, platform, reach, variant, grouped, values)
    return choose_stored(*chosen) is None and all(choose(kernel, *chosen).use_tma for kernel in KERNELS)


def pairs_in_flight(platform: Platform, bytes_each: int, tiles: int, pairs: int, group: int = 1) -> int:
    """Pairs of sequence and heads that run side by side, of `pairs` with `tiles` programs each, where each group of pairs rereads
    `bytes_each`: as many as the L2 cache holds. On NVIDIA, where these are fewer than two programs for every multiprocessor,
    about so many, in rounds of one size: between rounds, and behind a smaller last one, multiprocessors have nothing to do.
    """
    budget = (32 << 20) if platform.vendor == "cpu" else tuning.table(platform).l2_budget
    fit, fill = max(1, budget // bytes_each), round(2 * platform.num_sms / (tiles * group))
    if fit >= fill or platform.vendor != "nvidia":
        return min(fit * group, pairs)
    groups = pairs // group
    rounds = max(1, groups // fill)
    even = next((n for n in range(rounds, rounds // 2, -1) if groups % n == 0), rounds)
    return -(-groups // even) * group
