"""Attention families whose config.json has Llama's keys: what they share. A family says in what it differs."""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf import settings, tensors
from llmtrain.models.hf.differences import refuse_differences
from llmtrain.models.hf.family import Weight
from llmtrain.models.hf.settings import FULL, SLIDING, Refusals
from llmtrain.models.pattern import Layer, format_pattern
from llmtrain.models.sections.dense import MLPSection


class Decoder:
    """A family of layers that are all attention and an MLP, some of them with a window.

    Not read, because without effect on the outputs: dropout of attention, use_cache. Not written: model.dropout. What else of
    a model of ours the class does not have is found by reading back what was written.
    """

    kind: ClassVar[type[PreTrainedConfig]]
    """The class of config.json."""
    architecture = ""
    """The class of the model, where its name does not follow from that of `kind`."""
    has_layer_types: ClassVar[bool] = False
    """The class takes the kind of each layer from layer_types; otherwise all have the window, if there is one."""
    layer_kinds: ClassVar[tuple[str, ...]] = (FULL, SLIDING)
    """Types of layers there."""
    eps: ClassVar[str] = "rms_norm_eps"
    activation: ClassVar[str] = "hidden_act"
    gated: ClassVar[bool] = True
    """The MLP is a gated one."""
    partial_rotary: ClassVar[bool] = False
    default_fraction: ClassVar[float] = 1.0
    """The part that is rotated where config.json has no partial_rotary_factor."""
    in_pairs: ClassVar[bool] = False
    """Positions turn neighbouring channels of a head (row_orders.pairs_apart)."""
    positions: ClassVar[tuple[str, ...]] = ("rotary",)
    """Types of positions of layers."""
    experts: ClassVar[bool] = False
    """The class has layers of experts."""
    norm: ClassVar[dict[str, Any]] = {"type": "rmsnorm"}
    block: ClassVar[dict[str, Any]] = {}
    """What of our attention block the class has in any config."""

    # Names of tensors: of the model, of a layer by our names, and inside mixer and MLP.
    embedding: ClassVar[str] = "model.embed_tokens"
    layers: ClassVar[str] = "model.layers"
    final_norm: ClassVar[str] = "model.norm"
    head: ClassVar[tuple[str, ...]] = ("lm_head.weight",)
    """The name that is written, and other spellings."""
    norms: ClassVar[dict[str, str]] = {"norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    mixer: ClassVar[str] = "self_attn"
    qkv: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    qkv_by_head: ClassVar[bool] = False
    """See tensors.attention_mixer."""
    out: ClassVar[str] = "o_proj"
    mlp: ClassVar[str] = "mlp"
    mlp_in: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    mlp_out: ClassVar[str] = "down_proj"

    def __init__(self) -> None:
        self.model_type = self.kind.model_type
        self.architecture = self.architecture or self.kind.__name__.replace("Config", "ForCausalLM")

    def read_config(self, published: Mapping[str, Any]) -> dict[str, Any]:
        config = settings.parse(self.kind, published)
        refusals = Refusals()
        self._refuse_foreign_keys(config, refusals)
        types = self.layer_types(config, refusals)
        names = self.block_names(types)
        section = {
            "vocab_size": config.vocab_size,
            "d_model": config.hidden_size,
            "max_seq_len": config.max_position_embeddings,
            "norm": {**self.norm, "eps": getattr(config, self.eps)},
            "tie_embeddings": config.tie_word_embeddings,
            "blocks": {name: self.read_block(config, kind, refusals) for kind, name in names.items()},
            "layers": format_pattern([Layer(names[kind]) for kind in types]),
            **settings.read_init(config.initializer_range),
            **self.read_model(config, refusals),
        }
        refusals.check()
        return settings.validate_section(section)

    def _refuse_foreign_keys(self, config: Any, refusals: Refusals) -> None:
        """Refuse what would change the model in another family, and has no effect in this one, whose class does not have it."""
        plain = {"attention_bias": False, "mlp_bias": False, "num_key_value_heads": config.num_attention_heads}
        for key, without in ({"sliding_window": None} | plain).items():
            found, own = getattr(config, key, without), key in self.kind.__dataclass_fields__
            instead = f"{self.architecture} passes over it; set it to {settings.as_yaml(without)}"
            refusals.unless(own or found in (without, None), key, found, instead)

    def layer_types(self, config: Any, refusals: Refusals) -> list[str]:
        """The type of each layer, as in layer_types of config.json."""
        return settings.layer_types(config, self.has_layer_types, refusals, self.layer_kinds)

    def block_names(self, types: list[str]) -> dict[str, str]:
        """The name of our block for each type of layer."""
        return {kind: "window" if kind == SLIDING and FULL in types else "attn" for kind in types}

    def read_model(self, config: Any, refusals: Refusals) -> dict[str, Any]:
        """Further settings of the model."""
        return {}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        """The block of layers of one type."""
        block: dict[str, Any] = {"type": "attention", "n_heads": config.num_attention_heads}
        if getattr(config, "num_key_value_heads", config.num_attention_heads) != config.num_attention_heads:
            block["n_kv_heads"] = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None)
        if head_dim is not None and head_dim * config.num_attention_heads != config.hidden_size:
            block["head_dim"] = head_dim
        block["position"] = self.read_position(config, layer_type, refusals)
        if layer_type == SLIDING:
            block["sliding_window"] = config.sliding_window
        if getattr(config, "attention_bias", False):
            block |= {"qkv_bias": True, "out_bias": True}
        kind = settings.read_mlp(config, self.activation, refusals, self.gated)
        block["mlp"] = {"type": kind, "d_ff": config.intermediate_size, "bias": getattr(config, "mlp_bias", False)}
        return block | self.block

    def read_position(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        return settings.read_rotary(config, refusals, partial=self.partial_rotary, layer_type=layer_type)

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        blocks = self.layer_blocks(config)
        fields = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "num_hidden_layers": len(blocks),
            "max_position_embeddings": config.max_seq_len,
            "initializer_range": min(config.init.std, 1.0),  # the classes take no more
            self.eps: config.norm.eps,
            "tie_word_embeddings": config.tie_embeddings,
            **self.write_feed_forward(config, blocks),
            **self.write_mixers(config, blocks),
        }
        written = settings.class_config(self.kind, self.architecture, fields | self.write_fields(config, blocks))
        refuse_differences(config, self, written)
        return written

    def write_feed_forward(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        """Keys of the feed-forward layers. layers: the block of each."""
        mlp = layers[0].mlp
        assert isinstance(mlp, MLPSection)
        fields = {"intermediate_size": mlp.d_ff, self.activation: settings.write_mlp(mlp.type, self.gated)}
        return fields | ({"mlp_bias": mlp.bias} if "mlp_bias" in self.kind.__dataclass_fields__ else {})

    def layer_blocks(self, config: ModelConfig) -> list[AttentionBlock]:
        """The block of each layer. Raises OtherLayersError for layers that the class does not have."""
        return settings.attention_layers(config, self.architecture, self.experts, self.positions)

    def write_mixers(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        """Keys of the mixers. layers: the block of each."""
        windows = [layer.sliding_window for layer in layers if layer.sliding_window is not None]
        types = [FULL if layer.sliding_window is None else SLIDING for layer in layers]
        further: dict[str, Any] = {"sliding_window": max(windows, default=None), "layer_types": types}
        if self.has_layer_types and not windows:  # some classes want a number all the same: their default
            del further["sliding_window"]
        known = self.kind.__dataclass_fields__
        return self.write_attention(config, layers[0]) | {key: further[key] for key in further if key in known}

    def write_attention(self, config: ModelConfig, block: AttentionBlock) -> dict[str, Any]:
        known, head_dim = self.kind.__dataclass_fields__, block.spec(config.d_model).head_dim
        fields: dict[str, Any] = {"num_attention_heads": block.n_heads, **self.write_position(block)}
        if "head_dim" in known or head_dim * block.n_heads != config.d_model:
            fields["head_dim"] = head_dim
        further = {"num_key_value_heads": block.kv_heads, "attention_bias": block.qkv_bias}
        return fields | {key: further[key] for key in further if key in known}

    def write_position(self, block: AttentionBlock) -> dict[str, Any]:
        position = block.position
        if position.type != "rotary":
            return {}
        return settings.write_rotary(position, partial=self.partial_rotary, default=self.default_fraction)

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        """Further keys of config.json. layers: the block of each."""
        return {}

    def weights(self, config: ModelConfig) -> list[Weight]:
        made = [tensors.embedding(config, f"{self.embedding}.weight", *self.head)]
        for i, block in enumerate(self.layer_blocks(config)):
            made += self._layer_weights(f"blocks.{i}", f"{self.layers}.{i}", block, config)
        made += tensors.norm("norm", self.final_norm, config.d_model, config.norm)
        return made + tensors.head(config, *self.head)

    def _layer_weights(self, ours: str, theirs: str, block: AttentionBlock, config: ModelConfig) -> list[Weight]:
        """Weights of one layer, in the order of our parameters."""
        norms = {
            name: tensors.norm(f"{ours}.{name}", f"{theirs}.{published}", config.d_model, block.norm or config.norm)
            for name, published in self.norms_of(block).items()
        }
        return [
            *norms["norm"],
            *self.mixer_weights(f"{ours}.mixer", theirs, block, config),
            *norms.get("post_norm", []),
            *norms["mlp_norm"],
            *self.feed_forward_weights(f"{ours}.mlp", theirs, block.mlp, config.d_model),
            *norms.get("mlp_post_norm", []),
        ]

    def norms_of(self, block: AttentionBlock) -> dict[str, str]:
        """Names of a layer's norms by ours."""
        return self.norms

    def mixer_weights(self, ours: str, theirs: str, block: AttentionBlock, config: ModelConfig) -> list[Weight]:
        """Weights of a mixer, or of several side by side. theirs: the prefix of the layer."""
        rotary, head_dim = block.position, block.spec(config.d_model).head_dim
        rotated = rotary.width(head_dim) if self.in_pairs and rotary.type == "rotary" else None
        return tensors.attention_mixer(
            ours,
            f"{theirs}.{self.mixer}",
            block,
            config,
            qkv=self.qkv,
            out=self.out,
            by_head=self.qkv_by_head,
            in_pairs=rotated,
        )

    def feed_forward_weights(self, ours: str, theirs: str, mlp: Any, d_model: int) -> list[Weight]:
        """Weights of a feed-forward layer. theirs: the prefix of the layer."""
        return self.mlp_weights(ours, f"{theirs}.{self.mlp}", mlp, d_model)

    def mlp_weights(self, ours: str, theirs: str, mlp: MLPSection, d_model: int) -> list[Weight]:
        rows = (2 if mlp.gated else 1) * mlp.d_ff // len(self.mlp_in)
        return [
            *tensors.linear(f"{ours}.w_in", {f"{theirs}.{name}": rows for name in self.mlp_in}, d_model, mlp.bias),
            *tensors.linear(f"{ours}.w_out", {f"{theirs}.{self.mlp_out}": d_model}, mlp.d_ff, mlp.bias),
        ]
