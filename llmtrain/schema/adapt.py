"""The `adapt` section of the YAML: changes to a model, such as adapters beside frozen weights. No torch here."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

from pydantic import Field

from llmtrain.config.base import PositiveFloat, Probability, Problem, Section, Width
from llmtrain.models.sections.feed_forward import ImplementedSection

WeightFormat = Literal["int8", "float8"]
"""Of linear layers for inference (adapt/stored_weights.py)."""
NF4_BLOCK, NF4_SCALES = 64, 256
"""Neighbours that share a scale, and scales that share one of their own (adapt/nf4.py)."""
NF4_BYTES = 1 / 2 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * NF4_SCALES)
"""Bytes of one weight."""


class AdaptationSection(ImplementedSection):
    """Settings of one change to the model. implementation: of its Converter (adapt/base.py)."""


class LoraGroup(Section):
    """Another rank or scale for some of the adapted layers."""

    match: str
    """Their names, as a pattern; that of a fused projection is of all of its parts. Of several entries that match a layer, the last
    one counts."""
    rank: Width | None = None
    alpha: PositiveFloat | None = None

    def problems(self) -> Iterator[Problem]:
        if self.rank is None and self.alpha is None:
            yield Problem("rank", None, "an entry of groups gives a rank, an alpha, or both")

    def is_of(self, names: Iterable[str]) -> bool:
        return any(fnmatchcase(name, self.match) for name in names)


class LoraConfig(AdaptationSection):
    """Low-rank adapters beside frozen weights (Hu et al., arXiv:2106.09685): a layer computes W x + scale * B A x, and only A and
    B are trained. B is 0 at first."""

    implementation: ClassVar[str] = "llmtrain.adapt.lora:Lora"

    rank: Width = 8
    alpha: PositiveFloat | None = None
    """The scale of an adapter is alpha / rank. Default: twice the rank."""
    rslora: bool = False
    """The scale is alpha / sqrt(rank) (Kalajdzievski, arXiv:2312.03732)."""
    dora: bool = False
    """Norms of the rows of W + scale * B A are trained apart from their directions (Liu et al., arXiv:2402.09353). Of linear
    layers, not of embedding and head."""
    dropout: Probability = 0.0
    """Share of the inputs of adapters that is dropped in training."""
    targets: list[str] | None = Field(default=None, min_length=1)
    """Names of layers, as patterns: `*.wo`, `blocks.3.mixer.in_proj`, `embed`, `head`; also of a part of a fused projection:
    `*.wqkv.v` (q, k, v), `*.w_in.up` (gate, up), `*.in_proj.dt` (z, x, B, C, dt; q, k, v, z, b, a). A shared block has adapters
    for each of its uses, `blocks.5.shared_input.mixer.wo`; experts one for each of them, `*.experts.w_in`, `*.experts.w_out`.
    Default: all linear layers of mixers and feed-forward layers, without parts that have fewer channels than the rank."""
    groups: list[LoraGroup] = []

    def rank_of(self, *names: str) -> int:
        """Rank of the adapter of a target, which has these names: its own, and its layer's."""
        found = next((g.rank for g in reversed(self.groups) if g.rank and g.is_of(names)), None)
        return found or self.rank

    def scale_of(self, *names: str) -> float:
        rank = self.rank_of(*names)
        alpha = next((g.alpha for g in reversed(self.groups) if g.alpha and g.is_of(names)), self.alpha)
        alpha = 2.0 * rank if alpha is None else alpha
        return alpha / (rank**0.5 if self.rslora else rank)


class AdaptConfig(Section):
    """Changes to the model, by name, in this order: parameters that are added, and those that are frozen. Checkpoints then hold
    what is trained, and name the checkpoint of init_from, where the frozen weights are."""

    lora: LoraConfig | None = None
    train: list[str] | None = Field(default=None, min_length=1)
    """Weights of the model itself that are trained, beside adapters or alone, as patterns of their names: `*_adapter.*` are those
    that Zamba2 has of each use of a shared block, `*norm*` those of norms. All others are frozen."""
    base: Literal["bf16", "nf4"] = "bf16"
    """Frozen weights in memory. bf16: in the format in which layers compute (fp32 with train.precision: fp32). nf4: those of
    linear layers in 4 bits (QLoRA, Dettmers et al., arXiv:2305.14314), which are widened for each product."""

    @property
    def draws_in_training(self) -> bool:
        """True if a change draws random numbers."""
        return self.lora is not None and self.lora.dropout > 0

    @property
    def adds_alone(self) -> bool:
        """True if the model without what was added is the one that it began as."""
        return self.train is None

    def sections(self) -> list[AdaptationSection]:
        """Sections that are there, in order."""
        found = (getattr(self, name) for name in type(self).model_fields)
        return [section for section in found if isinstance(section, AdaptationSection)]
