"""Families with experts: the auxiliary loss of their classes in transformers, and what is refused."""

import pytest

from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hf.family import UnsupportedModelError, family_of_hf_config
from tests.support import hf
from tests.support.hf_families import EXPERTS, PEERS

UNPOOLED = ("zaya", "dots1", "nemotron_h", "deepseek_v2", "deepseek_v3", "glm4_moe", "kimi_linear")
POOLED = [peer.name for peer in EXPERTS if peer.model_type not in UNPOOLED]
"""Classes with an auxiliary loss."""


@pytest.mark.parametrize("number", [0, 1, 2, 9, 20])
@pytest.mark.parametrize("name", POOLED)
def test_same_auxiliary_loss_and_its_gradients(name, number):
    case = PEERS[name].case(number)
    peer = PEERS[name].made(case)
    ours, tokens = hf.ours_in_memory(peer), hf.tokens_of(case, 19)
    found = CausalLM(ours).loss(tokens, tokens)
    found.loss.backward()
    # The class multiplies its loss by the weight as it adds it to the other.
    theirs = peer(tokens, labels=tokens, shift_labels=tokens, output_router_logits=True)
    assert ours.losses is not None
    assert float(ours.losses.terms["balance"]) == pytest.approx(
        peer.config.router_aux_loss_coef * float(theirs.aux_loss), rel=1e-4
    )
    theirs.loss.backward()
    gates = [p.grad for n, p in peer.named_parameters() if n.endswith((".gate.weight", ".router.weight"))]
    mine = [p.grad for n, p in ours.named_parameters() if n.endswith("router.weight")]
    for one, other in zip(mine, gates, strict=True):
        assert hf.distance(one, other) < 5e-4  # type: ignore[arg-type]


REFUSED = [
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0: the class clips behind the norms"),
    (
        "kimi_linear",
        {"tie_word_embeddings": True},
        "tie_word_embeddings = true: the class has an output layer of its own",
    ),
    ("kimi_linear", {"num_key_value_heads": 7}, "num_key_value_heads = 7: as many as num_attention_heads"),
    ("kimi_linear", {"num_shared_experts": 0}, "num_shared_experts = 0"),
    ("kimi_linear", {"hidden_act": "gelu"}, "hidden_act = gelu: the convolution has silu"),
    ("dots1", {"n_shared_experts": None}, "n_shared_experts = null"),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "EM"},
        r"hybrid_override_pattern\[0\] = E \(moe\): a layer of experts follows",
    ),
    ("nemotron_h", {"hybrid_override_pattern": "MEE"}, r"hybrid_override_pattern\[2\] = E"),
    ("mixtral", {"num_experts_per_tok": 9}, r"model.blocks.attn.*top_k.*exceeds n_experts"),
    ("mixtral", {"hidden_act": "relu"}, "hidden_act = relu"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED)
def test_rejects_options_that_are_not_here_by_name(name, changes, reason):
    published = hf.published_config(PEERS[f"{name} experts"].case(0).config)
    if "hybrid_override_pattern" in changes:
        published.pop("layers_block_type", None)
    with pytest.raises(UnsupportedModelError, match=reason):
        family_of_hf_config(published).read_config(published | changes)
