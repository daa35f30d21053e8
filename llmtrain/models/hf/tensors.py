"""Correspondence of parameters and published tensors: constructors that the families share."""

import dataclasses
from collections.abc import Iterable, Mapping

from llmtrain.models.config import AttentionBlock, GatedDeltaNetBlock, LatentAttentionBlock, Mamba2Block, ModelConfig
from llmtrain.models.hf import row_orders
from llmtrain.models.hf.family import Part, Weight
from llmtrain.models.sections.experts import ExpertsSection
from llmtrain.models.sections.layers import NormConfig


def same(ours: str, theirs: str, *shape: int, copies: tuple[str, ...] = ()) -> Weight:
    """A parameter that is one published tensor."""
    return Weight(ours, shape, (Part(theirs, shape, copies),))


def linear(
    ours: str,
    theirs: dict[str, int],
    d_in: int,
    bias: bool = False,
    orders: Mapping[str, tuple[int, ...]] | None = None,
) -> list[Weight]:
    """A linear layer whose output rows are those of one or more published layers, name -> rows, one after another.

    orders: of published layers' rows, see Part.
    """
    rows, order = sum(theirs.values()), orders or {}

    def parts(kind: str, *columns: int) -> tuple[Part, ...]:
        return tuple(Part(f"{name}.{kind}", (n, *columns), order=order.get(name, ())) for name, n in theirs.items())

    made = [Weight(f"{ours}.weight", (rows, d_in), parts("weight", d_in))]
    return [*made, Weight(f"{ours}.bias", (rows,), parts("bias"))] if bias else made


def embedding(config: ModelConfig, theirs: str, *head: str, older: tuple[str, ...] = ()) -> Weight:
    """The token embedding; a tied output layer, under any of its names `head`, may be stored as a copy of it. older: its names
    in older files."""
    tied = head if config.tie_embeddings else ()
    return same("embed.weight", theirs, config.vocab_size, config.d_model, copies=(*older, *tied))


def head(config: ModelConfig, theirs: str, *others: str) -> list[Weight]:
    """The output layer, when it is not tied. others: further spellings of its name."""
    shape = (config.vocab_size, config.d_model)
    return [] if config.tie_embeddings else [same("head.weight", theirs, *shape, copies=others)]


def norm(ours: str, theirs: str, width: int, config: NormConfig) -> list[Weight]:
    """A norm's weight, and its bias if it has one."""
    names = ("weight", "bias") if config.bias else ("weight",)
    return [same(f"{ours}.{name}", f"{theirs}.{name}", width) for name in names]


def attention_mixer(
    ours: str,
    theirs: str,
    block: AttentionBlock,
    config: ModelConfig,
    *,
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
    out: str = "o_proj",
    by_head: bool = False,
    in_pairs: int | None = None,
) -> list[Weight]:
    """Weights of an attention mixer. qkv: names of three projections, or of the one that they are; by_head: whose rows are q,
    k and v of the first head, then of the second, and so on. An output gate has the rows behind each head's queries.
    in_pairs: channels of each head that are rotated, neighbour with neighbour (row_orders.pairs_apart).
    """
    spec, d, qk_norm = block.spec(config.d_model), config.d_model, block.norm or config.norm
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    rows = (2 * q if block.output_gate else q, kv, kv) if len(qkv) == 3 else (q + 2 * kv,)
    published = {f"{theirs}.{name}": n for name, n in zip(qkv, rows, strict=True)}
    kinds = 3 if by_head else 2 if block.output_gate else 0  # in the first projection, head by head
    orders = {f"{theirs}.{qkv[0]}": row_orders.by_group(rows[0], (spec.head_dim,) * kinds)} if kinds else {}
    if in_pairs is not None:
        of = zip(qkv, (spec.n_heads, spec.n_kv_heads), strict=False)
        orders = {f"{theirs}.{name}": row_orders.pairs_apart(n, spec.head_dim, 0, in_pairs) for name, n in of}
    made = [same(f"{ours}.sinks", f"{theirs}.sinks", spec.n_heads)] if block.sinks else []
    made += linear(f"{ours}.wqkv", published, d, block.qkv_bias, orders)
    made += linear(f"{ours}.wo", {f"{theirs}.{out}": d}, q, block.out_bias)
    widths = {"full": (q, kv), "head": (spec.head_dim, spec.head_dim)}.get(block.qk_norm, ())
    for name, width in zip(("q_norm", "k_norm"), widths, strict=False):
        made += norm(f"{ours}.{name}", f"{theirs}.{name}", width, qk_norm)
    return made


def experts(
    ours: str,
    theirs: str,
    mlp: ExpertsSection,
    d_model: int,
    gate: str = "gate",
    matrices_in: tuple[str, ...] = ("gate_proj", "up_proj"),
    matrix_out: str = "down_proj",
    stacked: bool = False,
) -> list[Weight]:
    """Router and experts of a feed-forward layer. theirs: the prefix of the module that holds them; gate, matrices_in, matrix_out:
    names of the router, and of the parts of each expert's two products. stacked: the matrices of all experts are one tensor."""
    n, spec = mlp.n_experts, mlp.spec(d_model)
    biased = mlp.router.choice_bias
    made = [same(f"{ours}.choice_bias", f"{theirs}.{gate}.e_score_correction_bias", n)] if biased else []
    made += linear(f"{ours}.router", {f"{theirs}.{gate}": n}, d_model, mlp.router.bias)

    def parts(names: tuple[str, ...], rows: int, columns: int) -> tuple[Part, ...]:
        if stacked:
            return tuple(Part(f"{theirs}.{name}.weight", (n, rows, columns)) for name in names)
        each, of_all = (rows // len(names), columns), range(n)
        return tuple(Part(f"{theirs}.experts.{i}.{name}.weight", each) for i in of_all for name in names)

    shape_in, shape_out = (spec.d_in, spec.d_model), (spec.d_model, spec.d_ff)
    made.append(Weight(f"{ours}.experts.w_in", (n, *shape_in), parts(matrices_in, *shape_in)))
    made.append(Weight(f"{ours}.experts.w_out", (n, *shape_out), parts((matrix_out,), *shape_out)))
    return made


def latent_attention_mixer(
    ours: str, theirs: str, block: LatentAttentionBlock, config: ModelConfig, *, in_pairs: bool = False
) -> list[Weight]:
    """Weights of a latent attention mixer, with DeepSeek's names. in_pairs: positions turn neighbouring channels there
    (row_orders.pairs_apart)."""
    d, n, queries, norm_of_latents = config.d_model, block.n_heads, block.n_heads * block.head_dim, NormConfig()
    of_q = row_orders.pairs_apart(n, block.head_dim, block.nope_dim) if in_pairs else ()
    of_kv = row_orders.pairs_apart(1, block.latent_dim, block.kv_rank) if in_pairs else ()
    if block.q_rank is None:
        made = linear(f"{ours}.wq", {f"{theirs}.q_proj": queries}, d, orders={f"{theirs}.q_proj": of_q})
    else:
        made = linear(f"{ours}.wq_a", {f"{theirs}.q_a_proj": block.q_rank}, d, block.latent_bias)
        made += norm(f"{ours}.q_norm", f"{theirs}.q_a_layernorm", block.q_rank, norm_of_latents)
        q_b = f"{theirs}.q_b_proj"
        made += linear(f"{ours}.wq_b", {q_b: queries}, block.q_rank, orders={q_b: of_q})
    kv_a, made_of_latent = f"{theirs}.kv_a_proj_with_mqa", n * (block.nope_dim + block.value_dim)
    made += linear(f"{ours}.wkv_a", {kv_a: block.latent_dim}, d, block.latent_bias, {kv_a: of_kv})
    made += norm(f"{ours}.kv_norm", f"{theirs}.kv_a_layernorm", block.kv_rank, norm_of_latents)
    made += linear(f"{ours}.wkv_b", {f"{theirs}.kv_b_proj": made_of_latent}, block.kv_rank)
    return made + linear(f"{ours}.wo", {f"{theirs}.o_proj": d}, n * block.value_dim, block.out_bias)


def mamba2_mixer(ours: str, theirs: str, block: Mamba2Block, config: ModelConfig) -> list[Weight]:
    """Weights of a Mamba-2 mixer; names and layout are the same in transformers' Mamba2Mixer and Zamba2MambaMixer."""
    spec = block.spec(config.d_model)
    d_inner = block.inner_width(config.d_model)
    channels = d_inner + 2 * block.n_groups * block.d_state
    conv = (channels, block.d_conv)
    return [
        *linear(
            f"{ours}.in_proj", {f"{theirs}.in_proj": d_inner + channels + spec.n_heads}, config.d_model, block.proj_bias
        ),
        Weight(f"{ours}.conv.weight", conv, (Part(f"{theirs}.conv1d.weight", (channels, 1, block.d_conv)),)),
        *([same(f"{ours}.conv.bias", f"{theirs}.conv1d.bias", channels)] if block.conv_bias else []),
        *(same(f"{ours}.ssm.{name}", f"{theirs}.{name}", spec.n_heads) for name in ("A_log", "D", "dt_bias")),
        *([same(f"{ours}.norm.weight", f"{theirs}.norm.weight", d_inner)] if block.gated_norm else []),
        *linear(f"{ours}.out_proj", {f"{theirs}.out_proj": config.d_model}, d_inner, block.proj_bias),
    ]


def gated_deltanet_mixer(
    ours: str,
    theirs: str,
    block: GatedDeltaNetBlock,
    config: ModelConfig,
    *,
    projections: Mapping[str, int],
    by_group: Mapping[str, tuple[int, ...]] | None = None,
    conv: tuple[str, ...] = ("conv1d",),
    norm: str = "norm",
    out: str = "out_proj",
) -> list[Weight]:
    """Weights of a Gated DeltaNet mixer. projections: name -> rows, in the order q, k, v, output gate, b, a; by_group: see
    row_orders; conv: names of the convolutions of q, k and v, or of the one that they are.
    """
    d, (keys, values) = config.d_model, block.widths()
    channels = (keys, keys, values) if len(conv) == 3 else (2 * keys + values,)
    published = {f"{theirs}.{name}": rows for name, rows in projections.items()}
    order = {
        f"{theirs}.{name}": row_orders.by_group(projections[name], kinds) for name, kinds in (by_group or {}).items()
    }
    kernels = tuple(
        Part(f"{theirs}.{name}.weight", (n, 1, block.d_conv)) for name, n in zip(conv, channels, strict=True)
    )
    return [
        *linear(f"{ours}.in_proj", published, d, orders=order),
        # transformers saves the one that it has as three of equal size, whatever was loaded.
        Weight(f"{ours}.conv.weight", (sum(channels), block.d_conv), kernels, cut_anywhere=True),
        *(same(f"{ours}.decay.{name}", f"{theirs}.{name}", block.n_heads) for name in ("A_log", "dt_bias")),
        same(f"{ours}.norm.weight", f"{theirs}.{norm}.weight", block.value_head_dim),
        *linear(f"{ours}.out_proj", {f"{theirs}.{out}": d}, values),
    ]


def also_under(weights: Iterable[Weight], prefix: str, others: Iterable[str]) -> list[Weight]:
    """Add copies of the weights under other prefixes: a shared module is stored once per use."""
    others = list(others)

    def with_copies(part: Part) -> Part:
        assert part.name.startswith(prefix), part
        return dataclasses.replace(part, copies=tuple(other + part.name.removeprefix(prefix) for other in others))

    return [dataclasses.replace(weight, parts=tuple(map(with_copies, weight.parts))) for weight in weights]


def also_spelt(weights: Iterable[Weight], prefix: str, other: str) -> list[Weight]:
    """The weights, read also where names begin with `other` in place of `prefix`."""

    def with_spelling(part: Part) -> Part:
        copies = (other + part.name.removeprefix(prefix),) if part.name.startswith(prefix) else ()
        return dataclasses.replace(part, copies=(*part.copies, *copies))

    return [dataclasses.replace(weight, parts=tuple(map(with_spelling, weight.parts))) for weight in weights]
