"""ZAYA1 (Zyphra, arXiv:2511.17127) as transformers' ZayaForCausalLM: compressed convolutional attention, experts whose routers
hand a state from layer to layer, and scaled residuals."""

from typing import Any

from transformers import ZayaConfig

from llmtrain.models.config import CompressedAttentionBlock, ModelConfig
from llmtrain.models.hf import settings, tensors
from llmtrain.models.hf.experts import ExpertLayers
from llmtrain.models.hf.family import Part, Weight
from llmtrain.models.hf.settings import FULL, SLIDING, Refusals

_KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}
_FIRST = "first "
"""Mark of the first layer's type: its router reads no other's state."""
_ROUTER = {
    "down": "down_proj.weight",
    "down_bias": "down_proj.bias",
    "w_1": "router_mlp.fc1.weight",
    "w_2": "router_mlp.fc2.weight",
    "out": "router_mlp.out_proj.weight",
    "norm": "router_mlp.norm.weight",
    "bias_1": "router_mlp.fc1.bias",
    "bias_2": "router_mlp.fc2.bias",
    "previous_scale": "router_states_scale",
}
_SCALING = {"mixer_scaling": "post_attention_residual_scale", "mlp_scaling": "post_mlp_residual_scale"}
_SUMMANDS = {"stream": "residual", "branch": "hidden_states"}


class Zaya(ExpertLayers):
    """The class keeps the residual stream of a model in bf16 in fp32; here it is in bf16, as every model's. The last number of each
    balancing_biases, of the choice of no expert, is read and written as any other; from_pretrained of transformers 5.23 makes it
    -1, whatever the file holds.
    """

    kind = ZayaConfig
    has_layer_types = True
    router = {"renormalize": False, "choice_bias": True, "bias_rate": 0.001, "skip": True}
    aux_loss = None

    def layer_types(self, config: Any, refusals: Refusals) -> list[str]:
        config.layer_types = [_KINDS.get(kind, kind) for kind in config.layer_types]
        config.intermediate_size = config.moe_intermediate_size  # there are no other layers
        first, *others = super().layer_types(config, refusals)
        return [_FIRST + first, *others]

    def block_names(self, types: list[str]) -> dict[str, str]:
        plain = super().block_names([kind.removeprefix(_FIRST) for kind in types])
        return {kind: "first" if kind.startswith(_FIRST) else plain[kind] for kind in types}

    def read_model(self, config: Any, refusals: Refusals) -> dict[str, Any]:
        refusals.unless(not config.lm_head_bias, "lm_head_bias", config.lm_head_bias, "the head has none; set false")
        return {"embedding_scaling": True}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        block = super().read_block(config, layer_type.removeprefix(_FIRST), refusals)
        own_state = {"width": config.router_hidden_size, "eps": config.rms_norm_eps}
        block["mlp"]["router"]["mlp"] = own_state | {"previous": not layer_type.startswith(_FIRST)}
        convolutions = {"d_conv": config.cca_time0, "d_head_conv": config.cca_time1}
        return block | {"type": "compressed_attention", **convolutions, "residual_scaling": True}

    def read_position(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        (kind,) = (name for name, found in _KINDS.items() if found == layer_type)
        return settings.read_rotary(config, refusals, partial=True, layer_type=kind)

    def layer_blocks(self, config: ModelConfig) -> list[Any]:
        kinds = {"compressed_attention": CompressedAttentionBlock}
        found, refusals = settings.layer_blocks(config, self.architecture, kinds, experts=True), Refusals()
        for key, block in settings.used_blocks(config):
            assert isinstance(block, CompressedAttentionBlock)
            kind, position, path = block.mlp and block.mlp.type, block.position.type, f"model.blocks.{key}"
            refusals.unless(kind == "experts", f"{path}.mlp", kind, f"{self.architecture} has experts in every layer")
            instead = f"{self.architecture} has rotary ones; set position: {{type: rotary}}"
            refusals.unless(position == "rotary", f"{path}.position", position, instead)
        refusals.check()
        return found

    def write_mixers(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        fields, block = super().write_mixers(config, layers), layers[0]
        names = {ours: theirs for theirs, ours in _KINDS.items()}
        of_kind = {bool(one.sliding_window): one.position for one in reversed(layers)}
        ropes = {
            name: settings.write_rotary(of_kind.get(kind == SLIDING, block.position), partial=True, default=0.5)[
                "rope_parameters"
            ]
            for name, kind in _KINDS.items()
        }
        convolutions = {"cca_time0": block.d_conv, "cca_time1": block.d_head_conv}
        return (
            fields
            | convolutions
            | {"layer_types": [names[one] for one in fields["layer_types"]], "rope_parameters": ropes}
        )

    def write_position(self, block: Any) -> dict[str, Any]:
        return {}

    def write_fields(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        mlp = layers[0].mlp.router.mlp
        return {} if mlp is None else {"router_hidden_size": mlp.width}

    def weights(self, config: ModelConfig) -> list[Weight]:
        embedding, *others = super().weights(config)
        scaling = [
            tensors.same(f"embed_scaling.{kind}", f"model.input_hidden_states_{kind}", config.d_model)
            for kind in ("scale", "bias")
        ]
        return [embedding, *scaling, *others]

    def _layer_weights(self, ours: str, theirs: str, block: Any, config: ModelConfig) -> list[Weight]:
        return super()._layer_weights(ours, theirs, block, config) + [
            tensors.same(f"{ours}.{scaling}.{summand}.{kind}", f"{theirs}.{module}.{name}_{kind}", config.d_model)
            for scaling, module in _SCALING.items()
            for summand, name in _SUMMANDS.items()
            for kind in ("scale", "bias")
        ]

    def mixer_weights(self, ours: str, theirs: str, block: Any, config: ModelConfig) -> list[Weight]:
        spec, attention = block.spec(config.d_model), f"{theirs}.{self.mixer}"
        q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        rows = {"q_proj": q, "k_proj": kv, "v_proj_current": kv // 2, "v_proj_delayed": kv // 2}
        published = {f"{attention}.qkv_proj.{name}": n for name, n in rows.items()}
        depthwise, by_head = (f"{attention}.qkv_proj.conv_qk_{kind}" for kind in ("depthwise", "grouped"))
        shape = (q + kv, block.d_conv)
        return [
            tensors.same(f"{ours}.key_scale", f"{attention}.qk_norm.temp", spec.n_kv_heads),
            *tensors.linear(f"{ours}.wqkv", published, config.d_model, block.qkv_bias),
            *tensors.linear(f"{ours}.wo", {f"{attention}.o_proj": config.d_model}, q, block.out_bias),
            Weight(f"{ours}.conv.weight", shape, (Part(f"{depthwise}.weight", (q + kv, 1, block.d_conv)),)),
            tensors.same(f"{ours}.conv.bias", f"{depthwise}.bias", q + kv),
            tensors.same(f"{ours}.conv.head_weight", f"{by_head}.weight", q + kv, spec.head_dim, block.d_head_conv),
            tensors.same(f"{ours}.conv.head_bias", f"{by_head}.bias", q + kv),
        ]

    def feed_forward_weights(self, ours: str, theirs: str, mlp: Any, d_model: int) -> list[Weight]:
        router, gate, (n, width) = mlp.router.mlp, f"{theirs}.mlp.gate", (mlp.n_experts, mlp.d_ff)
        state = router.width
        shapes = {"down": (state, d_model), "w_1": (state, state), "w_2": (state, state), "out": (mlp.choices, state)}
        return [
            tensors.same(f"{ours}.choice_bias", f"{gate}.balancing_biases", mlp.choices),
            *(
                tensors.same(f"{ours}.router.{name}", f"{gate}.{published}", *shapes.get(name, (state,)))
                for name, published in _ROUTER.items()
                if router.previous or name != "previous_scale"
            ),
            tensors.same(f"{ours}.experts.w_in", f"{theirs}.mlp.experts.gate_up_proj", n, 2 * width, d_model),
            tensors.same(f"{ours}.experts.w_out", f"{theirs}.mlp.experts.down_proj", n, d_model, width),
        ]
