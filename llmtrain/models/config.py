"""The `model` section: named blocks, and a pattern that arranges them. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.base import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    Problem,
    Section,
    Width,
    free,
)
from llmtrain.models.pattern import Layer, PatternError, parse_pattern
from llmtrain.models.sections.attention import AttentionBlock
from llmtrain.models.sections.block import WithBackend
from llmtrain.models.sections.compressed_attention import CompressedAttentionBlock
from llmtrain.models.sections.experts import ExpertsSection
from llmtrain.models.sections.feed_forward import Divided
from llmtrain.models.sections.gated_deltanet import GatedDeltaNetBlock
from llmtrain.models.sections.kimi_delta import KimiDeltaBlock
from llmtrain.models.sections.latent_attention import LatentAttentionBlock
from llmtrain.models.sections.layers import NormBackend, NormConfig
from llmtrain.models.sections.mamba2 import Mamba2Block
from llmtrain.models.sections.mamba3 import Mamba3Block
from llmtrain.models.sections.parallel_mixers import ParallelMixersBlock
from llmtrain.models.sections.shared_attention import SharedAttentionBlock

Block = Annotated[
    AttentionBlock
    | CompressedAttentionBlock
    | GatedDeltaNetBlock
    | KimiDeltaBlock
    | LatentAttentionBlock
    | Mamba2Block
    | Mamba3Block
    | ParallelMixersBlock
    | SharedAttentionBlock,
    Field(discriminator="type"),
]

LayerRange = tuple[int, int]
"""Consecutive layers of a model: the first, and the one behind the last."""


class InitConfig(Section):
    """Weights are normal around 0; projections that end in the residual stream, or beside it in a mixer's input, shrink with
    depth."""

    type: Literal["normal", "kaiming"] = "normal"
    """normal: one std for all. kaiming: sqrt(2 / inputs) for each matrix, LLM Foundry's default (He et al., arXiv:1502.01852)."""
    std: Annotated[PositiveFloat, Field(le=10)] = 0.02
    """With type: normal."""
    scale_residual: bool = True
    """Divide the std of those projections by sqrt(2 * number of layers)."""


class ModelConfig(Section):
    """HybridLM = embedding -> layers -> norm -> head."""

    vocab_size: PositiveInt
    d_model: Width
    max_seq_len: PositiveInt = 2048
    """Longest sequence trained on; the length of learned position embeddings."""
    blocks: dict[str, Block]
    """Named blocks that `layers` refers to."""
    layers: str
    """The stack in one line: `m*6 (s+m m*5)*7`. `x*3` repeats, `(...)*3` repeats a group, `s+m` feeds shared block s into m."""
    positions: Literal["none", "learned"] = "none"
    """Learned position embeddings at the input. ALiBi and rotary positions belong to attention blocks."""
    norm: NormConfig = NormConfig()
    """The final norm, and the default of every block's."""
    tie_embeddings: bool = True
    embedding_multiplier: PositiveFloat = 1.0
    """Factor of the token embeddings at the input, before learned positions are added."""
    embedding_scaling: bool = False
    """A learned bias, and behind it a learned factor, for each channel of what the first layer reads (ZAYA1)."""
    logit_multiplier: PositiveFloat = 1.0
    """Factor of the logits, before logit_softcap."""
    logit_softcap: PositiveFloat | None = None
    dropout: Probability = 0.0
    """On the embedding and on every residual branch."""
    init: InitConfig = InitConfig()

    def problems(self) -> Iterator[Problem]:
        layers: list[Layer] = []
        try:
            layers = parse_pattern(self.layers)
        except PatternError as error:
            yield self.problem_at("layers", str(error))
        used = set()
        for layer in dict.fromkeys(layers):
            for name in filter(None, (layer.block, layer.shared)):
                used.add(name)
                if name not in self.blocks:
                    yield Problem("layers", name, f"no such block; model.blocks has {', '.join(sorted(self.blocks))}")
        for layer in dict.fromkeys(layers):
            block, shared = self.blocks.get(layer.block), self.blocks.get(layer.shared or "")
            if block is not None and block.shared_copies:
                yield Problem(
                    "layers", layer.block, f"is a shared block; write '{layer.block}+NAME' to feed it into block NAME"
                )
            if shared is not None and not shared.shared_copies:
                yield Problem(
                    "layers", layer.shared, "stands before a '+', which takes a block of type shared_attention"
                )
        if layers:
            for name in sorted(set(self.blocks) - used):
                yield Problem(f"blocks.{name}", name, "is defined but never used in model.layers; use it or remove it")
        yield from self._pooling_problems()
        yield from self._carried_problems(layers)
        for name, block in self.blocks.items():
            for problem in block.width_problems(self.d_model):
                yield Problem(f"blocks.{name}.{problem.path}", problem.found, problem.message)
            if block.shared_copies and (block.norm or self.norm).place != "before":
                yield Problem(
                    f"blocks.{name}.norm.place" if block.norm else "norm.place",
                    (block.norm or self.norm).place,
                    f"shared block {name} has its norms before attention and MLP; give it a norm of its own with place: before",
                )
            if block.norm and block.norm.model_fields_set == {"backend"} and block.norm.function != self.norm.function:
                yield Problem(
                    f"blocks.{name}.norm.backend",
                    block.norm.backend,
                    f"alone would make this norm one of type {block.norm.type} with eps {block.norm.eps:g}, unlike model.norm: "
                    "write its type, bias and eps too, or set model.norm.backend",
                )

    def _pooling_problems(self) -> Iterator[Problem]:
        """Layers whose experts cannot be counted together, as balance.over: model does."""
        pooled = {
            name: (mlp.choices, mlp.top_k)
            for name, mlp in self.experts().items()
            if mlp.balance.weight > 0 and mlp.balance.over == "model"
        }
        for name, found in pooled.items():
            if found != next(iter(pooled.values())):
                text = f"counts all layers together, but {' and '.join(pooled)} differ in n_experts or top_k; use layer"
                yield Problem(f"blocks.{name}.mlp.balance.over", "model", text)

    def _carried_problems(self, layers: list[Layer]) -> Iterator[Problem]:
        """Layers whose MLP reads what no layer before handed on."""
        width, wrong = 0, dict[str, str]()
        for place, layer in enumerate(layers):
            if (block := self.blocks.get(layer.block)) is None:
                continue
            reads, hands_on = block.carries
            if reads and reads != width:
                found = f"hand on one of {width}" if width else "hand on none"
                text = f"layer {place} reads a state of {reads} channels, but the layers before it {found}"
                wrong.setdefault(layer.block, text)
            width = hands_on or width
        for name, text in wrong.items():
            yield Problem(
                f"blocks.{name}.mlp", name, f"{text}; begin with a block that reads none (router.mlp.previous: false)"
            )

    @property
    def carried_width(self) -> int:
        """Most channels of a value that goes from layer to layer beside the hidden states; 0: there is none."""
        return max((block.carries.hands_on for block in self.blocks.values()), default=0)

    @property
    def draws_in_training(self) -> bool:
        """Layers draw random numbers in training."""
        return self.dropout > 0 or any(mlp.router.jitter > 0 for mlp in self.experts().values())

    @property
    def counts_over_ranks(self) -> bool:
        """Ranks add up loads of experts in each microbatch."""
        return any(mlp.balance.weight > 0 and mlp.balance.tokens == "step" for mlp in self.experts().values())

    def experts(self) -> dict[str, ExpertsSection]:
        """The experts of each block that has some."""
        return {name: block.mlp for name, block in self.blocks.items() if isinstance(block.mlp, ExpertsSection)}

    def with_backends(self, norm: NormBackend, backend_of: Callable[[WithBackend], str]) -> ModelConfig:
        """The same function by other kernels. norm: the backend of every norm; backend_of: that of a mixer's section."""
        blocks = {name: block.with_backends(norm, backend_of) for name, block in self.blocks.items()}
        return self.model_copy(update={"blocks": blocks, "norm": self.norm.model_copy(update={"backend": norm})})

    def divided(self) -> Iterator[Divided]:
        """Heads, groups and channels that tensor-parallel ranks divide (train.parallel.tensor), of blocks that can be divided."""
        yield Divided("vocab_size", self.vocab_size)
        for name, block in self.blocks.items():
            divided = block.divided_by_layer(self.d_model)
            for one in () if isinstance(divided, str) else divided:
                yield one._replace(name=f"block {name}: {one.name}")

    def layer_list(self) -> list[Layer]:
        """The expanded pattern, one entry per layer."""
        return parse_pattern(self.layers)


class LossConfig(Section):
    """Cross entropy over the vocabulary, averaged over tokens that have a label."""

    type: Literal["auto", "plain", "chunked"] = free("auto")
    """plain keeps all logits; chunked never does, and computes their gradient in the forward pass. auto: chunked on GPU."""
    chunk_tokens: PositiveInt = free(8192)
    """Tokens whose logits exist at one time in the chunked form."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of log(Z)^2 (PaLM, arXiv:2204.02311 section 5)."""
