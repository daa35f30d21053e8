"""Families with Llama's keys whose feed-forward layers are experts, in all layers or in some: what they share."""

from typing import Any, ClassVar

from llmtrain.models.config import ModelConfig
from llmtrain.models.hf import settings, tensors
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.family import OtherLayersError, Weight
from llmtrain.models.hf.settings import Refusals
from llmtrain.models.sections.dense import MLPSection
from llmtrain.models.sections.experts import ExpertsSection

_MARK = "+experts"


class ExpertLayers(Decoder):
    """Stands before the family's other bases. A layer's type, as in layer_types, has a mark where it has experts.

    Not read, because without effect on the outputs: output_router_logits. The weight of the auxiliary loss is read where
    config.json has one; where it has none, the bias of the choice is changed by 0.001 after each step (arXiv:2412.19437).
    """

    experts = True
    dense: ClassVar[bool] = False
    """A model may have no experts at all; otherwise another family takes it."""
    number: ClassVar[str] = "num_experts"
    width: ClassVar[str] = "moe_intermediate_size"
    """Keys of the number of experts and of each one's width."""
    shared_width: ClassVar[str | None] = None
    router: ClassVar[dict[str, Any]] = {"type": "softmax"}
    """What of our router the class has in any config."""
    router_fields: ClassVar[dict[str, str]] = {}
    """Keys of config.json, and the fields of our router that they are."""
    aux_loss: ClassVar[str | None] = "router_aux_loss_coef"

    # Names of tensors, within a layer: of the module of experts, its router, each expert's matrices, and what stands beside them.
    moe: ClassVar[str] = "mlp"
    gate: ClassVar[str] = "gate"
    expert_in: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    expert_out: ClassVar[str] = "down_proj"
    stacked: ClassVar[bool] = False
    """All experts' matrices are one tensor."""
    shared: ClassVar[str | None] = None
    shared_gate: ClassVar[str | None] = None

    def is_sparse(self, config: Any, layer: int) -> bool:
        """True if the layer has experts."""
        return True

    def layer_types(self, config: Any, refusals: Refusals) -> list[str]:
        types = super().layer_types(config, refusals)
        return [kind + _MARK * self.is_sparse(config, i) for i, kind in enumerate(types)]

    def block_names(self, types: list[str]) -> dict[str, str]:
        plain = super().block_names([kind.removesuffix(_MARK) for kind in types])
        mixed = any(kind.endswith(_MARK) for kind in types) and not all(kind.endswith(_MARK) for kind in types)
        return {kind: plain[kind.removesuffix(_MARK)] + "_experts" * (mixed and kind.endswith(_MARK)) for kind in types}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        block = super().read_block(config, layer_type.removesuffix(_MARK), refusals)
        if layer_type.endswith(_MARK):
            block["mlp"] = self.read_experts(config, block["mlp"])
        return block

    def read_experts(self, config: Any, mlp: dict[str, Any]) -> dict[str, Any]:
        """mlp: what the layer would have without."""
        made: dict[str, Any] = {
            "type": "experts",
            "n_experts": getattr(config, self.number),
            "top_k": config.num_experts_per_tok,
            "d_ff": getattr(config, self.width),
            "activation": mlp["type"],
            "router": self.router | {ours: getattr(config, theirs) for theirs, ours in self.router_fields.items()},
        }
        if self.shared_width is not None:
            made["shared"] = {"type": mlp["type"], "d_ff": self.read_shared_width(config)}
            made["shared_gate"] = self.shared_gate is not None
        weight = getattr(config, self.aux_loss) if self.aux_loss else 0.0
        return made | {"balance": {"weight": float(weight), "over": "model"}}

    def read_shared_width(self, config: Any) -> int:
        assert self.shared_width is not None
        return getattr(config, self.shared_width)

    def layer_blocks(self, config: ModelConfig) -> list[Any]:
        found, refusals = super().layer_blocks(config), Refusals()
        if not self.dense and not any(isinstance(block.mlp, ExpertsSection) for block in found):
            refusals.unless(False, "model.layers", config.layers, f"{self.architecture} has experts")
        refusals.check(OtherLayersError)
        return found

    def write_feed_forward(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        plain = [block for block in layers if isinstance(block.mlp, MLPSection)]
        fields = super().write_feed_forward(config, plain) if plain else {}
        mlp = next((block.mlp for block in layers if isinstance(block.mlp, ExpertsSection)), None)
        if mlp is None:
            return fields | {self.number: 0}
        fields.setdefault(self.activation, settings.write_mlp(mlp.activation, self.gated))
        fields |= {self.number: mlp.n_experts, "num_experts_per_tok": mlp.top_k, self.width: mlp.d_ff}
        fields |= {theirs: getattr(mlp.router, ours) for theirs, ours in self.router_fields.items()}
        if self.aux_loss:
            fields[self.aux_loss] = mlp.balance.weight if mlp.balance.over == "model" else 0.0
        if self.shared_width is not None and mlp.shared is not None:
            fields |= self.write_shared_width(mlp, mlp.shared)
        return fields

    def write_shared_width(self, mlp: ExpertsSection, shared: MLPSection) -> dict[str, Any]:
        assert self.shared_width is not None
        return {self.shared_width: shared.d_ff}

    def feed_forward_weights(self, ours: str, theirs: str, mlp: Any, d_model: int) -> list[Weight]:
        if not isinstance(mlp, ExpertsSection):
            return super().feed_forward_weights(ours, theirs, mlp, d_model)
        moe = f"{theirs}.{self.moe}"
        made = tensors.experts(ours, moe, mlp, d_model, self.gate, self.expert_in, self.expert_out, self.stacked)
        if mlp.shared is not None:
            made += self.mlp_weights(f"{ours}.shared", f"{theirs}.{self.shared}", mlp.shared, d_model)
        if mlp.shared_gate:
            made += tensors.linear(f"{ours}.shared_gate", {f"{moe}.{self.shared_gate}": 1}, d_model)
        return made


class ExpertsBehindDense(ExpertLayers):
    """Families whose first layers are dense, and whose experts have MLPs for every token beside them (DeepSeek's keys)."""

    number = "n_routed_experts"
    shared_width = "n_shared_experts"
    aux_loss = None
    shared = "mlp.shared_experts"

    def is_sparse(self, config: Any, layer: int) -> bool:
        return layer >= config.first_k_dense_replace

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        for key in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
            refusals.unless(bool(getattr(config, key)), key, getattr(config, key), "the class needs a number")
        refusals.check()
        return super().read_block(config, layer_type, refusals)

    def read_shared_width(self, config: Any) -> int:
        return config.n_shared_experts * config.moe_intermediate_size

    def write_shared_width(self, mlp: ExpertsSection, shared: MLPSection) -> dict[str, Any]:
        return {"n_shared_experts": max(shared.d_ff // mlp.d_ff, 1)}

    def write_fields(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        sparse = (i for i, block in enumerate(layers) if isinstance(block.mlp, ExpertsSection))
        return {"first_k_dense_replace": next(sparse, len(layers))}


BIASED_SIGMOID: dict[str, Any] = {"type": "sigmoid", "choice_bias": True, "bias_rate": 0.001}
"""DeepSeek-V3's router (arXiv:2412.19437), its balance by the bias alone."""
SIGMOID_FIELDS = {
    "n_group": "groups",
    "topk_group": "top_groups",
    "norm_topk_prob": "renormalize",
    "routed_scaling_factor": "scale",
}
