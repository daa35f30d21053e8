"""Experts and their routers against plain loops over tokens, and what bad settings get."""

import math
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from llmtrain.adapt.base import meta_model
from llmtrain.config.shipped import ROOT, find_config
from llmtrain.flops.count import count_parameters
from llmtrain.kernels import platform, registry
from llmtrain.kernels.experts.spec import ExpertsSpec
from llmtrain.models.attached_loss import AttachedLosses
from llmtrain.models.backends import backend_problems
from llmtrain.models.config import ModelConfig
from llmtrain.models.context import BlockContext
from llmtrain.models.feed_forward.experts import Experts
from llmtrain.models.feed_forward.routers import route
from llmtrain.models.layer_part import step_sums
from llmtrain.models.parameters import parameter_info
from llmtrain.models.sections.experts import ExpertsSection, RouterSection
from llmtrain.schema.load import load_config
from tests.support import experts

WITHOUT = BlockContext(None, None)
D = 16


def layer(dtype: torch.dtype = torch.float64, **settings: Any) -> Experts:
    section = ExpertsSection.model_validate({"type": "experts", "n_experts": 5, "top_k": 2, "d_ff": 12, **settings})
    made, g = Experts(section, D, platform.cpu(), dtype), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) / 3)
        for buffer in made.buffers():
            buffer.copy_(torch.randn(buffer.shape, generator=g) / 3)
        for total in step_sums(made):
            total.zero_()
    return made.to(dtype)


def activated(h: Tensor, kind: str) -> Tensor:
    if kind in ("relu2", "gelu"):
        return F.relu(h) ** 2 if kind == "relu2" else F.gelu(h)
    gate, up = h[: len(h) // 2], h[len(h) // 2 :]
    return {"swiglu": F.silu, "geglu": F.gelu}[kind](gate) * up


def by_token(made: Experts, x: Tensor) -> Tensor:
    """The layer's output of x [T, D], token by token and expert by expert."""
    section, rows = made.section, []
    router: Any = made.router
    for token in x:
        logits = router.weight @ token + (0 if router.bias is None else router.bias)
        scores = logits.sigmoid() if section.router.type == "sigmoid" else logits.softmax(0)
        bias = made.choice_bias if section.router.choice_bias else torch.zeros_like(scores)
        chosen = sorted(range(section.n_experts), key=lambda e: -(scores + bias).tolist()[e])[: section.top_k]
        weights = torch.stack([scores[e] for e in chosen])
        if section.router.renormalize or section.router.type == "top_k_softmax":
            weights = weights / weights.sum()
        z, total = token if made.latent_in is None else made.latent_in.weight @ token, 0
        for e, weight in zip(chosen, weights, strict=True):
            h = made.experts.w_in[e] @ z + (0 if made.experts.b_in is None else made.experts.b_in[e])
            y = made.experts.w_out[e] @ activated(h, section.activation)
            total = total + section.router.scale * weight * (
                y if made.experts.b_out is None else y + made.experts.b_out[e]
            )
        total = total if made.latent_out is None else made.latent_out.weight @ total
        if made.shared is not None:
            beside = made.shared.w_out.weight @ activated(made.shared.w_in.weight @ token, "swiglu")
            total = total + (
                beside if made.shared_gate is None else (made.shared_gate.weight @ token).sigmoid() * beside
            )
        rows.append(total)
    return torch.stack(rows)


LAYERS = {
    "plain": {},
    "without a sum of 1, ungated": {"router": {"renormalize": False}, "activation": "relu2", "top_k": 3},
    "softmax of the chosen, with biases": {
        "router": {"type": "top_k_softmax", "bias": True},
        "bias": True,
        "activation": "geglu",
    },
    "sigmoid": {"router": {"type": "sigmoid", "choice_bias": True, "scale": 2.5}, "shared": {"d_ff": 6}},
    "one expert each, a gated shared one": {
        "top_k": 1,
        "shared": {"d_ff": 6},
        "shared_gate": True,
        "router": {"renormalize": False},
    },
    "all experts, in fewer channels": {"top_k": 5, "latent": 8, "activation": "gelu"},
}


@pytest.mark.parametrize("settings", LAYERS.values(), ids=list(LAYERS))
def test_the_layer_is_its_tokens_one_by_one(settings):
    made = layer(**settings)
    x = torch.randn(2, 7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    up = torch.randn(2, 7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    wanted = by_token(made, x.flatten(0, 1)).view_as(x)
    inputs = [x, *made.parameters()]
    expected = torch.autograd.grad(wanted, inputs, up, allow_unused=True)
    found = made(x, WITHOUT)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(
        list(torch.autograd.grad(found, inputs, up, allow_unused=True)), list(expected), atol=1e-12, rtol=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", ["spread", "all to one", "none to some"])
def test_grouped_mm_computes_what_the_reference_does(dtype, chosen):
    spec = ExpertsSpec(D, 24, 6, 2, dtype=str(dtype).removeprefix("torch."))
    g = torch.Generator().manual_seed(4)
    x, up = torch.randn(2, 9, D, generator=g).to(dtype).unbind()
    w_in, w_out = torch.randn(6, 48, D, generator=g).to(dtype), torch.randn(6, D, 24, generator=g).to(dtype)
    weights = torch.rand(9, 2, generator=g)
    experts_of = {
        "spread": torch.rand(9, 6, generator=g).topk(2).indices,
        "all to one": torch.tensor([[3, 1]]).expand(9, 2),
        "none to some": torch.tensor([[5, 4]] * 4 + [[4, 2]] * 5),
    }[chosen]
    found = []
    for backend in ("reference", "grouped_mm"):
        kernel = registry.resolve("experts", backend, spec, platform.cpu()).build(spec, platform.cpu())
        leaves = [t.clone().requires_grad_() for t in (x, weights, w_in, w_out)]
        y = kernel(leaves[0], experts_of, *leaves[1:])
        found.append([y, *torch.autograd.grad(y, leaves, up)])
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / other.norm()) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "grouped_mm"])
def test_gradients_are_the_same_where_the_layer_is_traced(backend, dtype):
    made = layer(dtype, backend=backend, n_experts=4, d_ff=16, shared={"d_ff": 8})
    x = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(2)).to(dtype)

    def gradients(function: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        return list(torch.autograd.grad(function(leaf).square().sum(), [leaf, *made.parameters()]))

    traced = torch.compile(lambda x: made(x, WITHOUT), backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(traced), gradients(lambda x: made(x, WITHOUT)), strict=True):
        assert float(other.norm()) > 0 and float((one - other).norm() / other.norm()) < 1e-5


def test_groups_hold_the_choice_together():
    """By the published definition (arXiv:2412.19437, section 2.1.2): the groups with the best sums of two, then their best."""
    section = RouterSection.model_validate(
        {"type": "sigmoid", "choice_bias": True, "groups": 3, "top_groups": 2, "renormalize": False}
    )
    logits = torch.tensor([[4.0, -9, -9, 1, 1, 0, 2, 0.5, 0]])
    bias = torch.zeros(9)
    routing = route(section, 3, logits, bias)
    assert sorted(routing.chosen[0].tolist()) == [3, 4, 6] and 0 not in routing.chosen
    bias[1] = 1.0  # of choice alone: the first group's sum is now the highest
    again = route(section, 3, logits, bias)
    assert sorted(again.chosen[0].tolist()) == [0, 1, 6]
    assert torch.equal(again.weights, logits.sigmoid().gather(1, again.chosen))


def test_noise_is_drawn_in_training_alone():
    made = layer(torch.float32, router={"jitter": 0.3})
    x = torch.randn(1, 50, D)
    assert torch.equal(made.eval()(x, WITHOUT), made(x, WITHOUT))
    with torch.no_grad():
        assert torch.equal(made.train()(x, WITHOUT), made(x, WITHOUT))
    first = made(x, WITHOUT)
    assert (
        not torch.equal(first, made(x, WITHOUT)) and (first - made.eval()(x, WITHOUT)).abs().max() < first.abs().max()
    )


@pytest.mark.parametrize("capacity", [0.2, 0.7, 1.0, 9.0])
def test_beyond_its_capacity_an_expert_drops_tokens_in_training_alone(capacity):
    made = layer(torch.float32, capacity=capacity)
    x, T, router = torch.randn(1, 11, D, generator=torch.Generator().manual_seed(7)), 11, made.router
    scores, chosen = F.linear(x[0], cast("Tensor", router.weight)).softmax(-1).topk(2)
    room, kept = [math.ceil(capacity * T * 2 / 5)] * 5, torch.zeros(T, 2)
    for rank in range(2):
        for token in range(T):
            kept[token, rank] = room[chosen[token, rank]] > 0
            room[chosen[token, rank]] -= 1
    weights = scores / scores.sum(-1, keepdim=True) * kept
    losses = AttachedLosses.named(["balance"], torch.device("cpu"))
    found = made(x, BlockContext(None, None, losses=losses))
    expected = made.experts(made.kernel, x[0], chosen, weights)
    torch.testing.assert_close(found[0], expected)
    found.sum().backward()
    assert float(made.metrics()["dropped"]) == pytest.approx(1 - float(kept.mean()))
    assert (kept.mean() == 1) == (capacity == 9.0)
    torch.testing.assert_close(made.eval()(x, WITHOUT), layer(torch.float32)(x, WITHOUT))


def test_the_balance_of_a_step_counts_earlier_microbatches_too():
    made = layer(torch.float32, balance={"weight": 0.5, "tokens": "step"})
    losses = AttachedLosses.named(["balance"], torch.device("cpu"))
    context, counts, terms = BlockContext(None, None, losses=losses), torch.zeros(5), 0.0
    router: Any = made.router
    for seed in range(3):
        x = torch.randn(1, 8, D, generator=torch.Generator().manual_seed(seed))
        scores = F.linear(x[0], router.weight).softmax(-1).detach()
        counts += F.one_hot(scores.topk(2).indices, 5).sum((0, 1))
        terms += float(0.5 * 5 * (counts / counts.sum() * scores.mean(0)).sum())
        made(x, context).sum().backward()
    assert float(losses.terms["balance"]) == pytest.approx(terms, rel=1e-5) and torch.equal(made.load, counts)


def test_flops_and_parameters_are_those_that_a_token_meets():
    made = layer(latent=8, shared={"d_ff": 6}, shared_gate=True, activation="swiglu")
    router, latent, shared, gate = 5 * D, 2 * 8 * D, 3 * 6 * D, D
    active = 2 * (3 * 8 * 12) + router + latent + shared + gate
    assert made.flops(10).forward.total == 2 * 10 * active and made.flops(10).total == 6 * 10 * active
    made.experts.requires_grad_(False)
    assert made.flops(10).grad_weight.total == 2 * 10 * (active - 2 * 3 * 8 * 12)
    counts = count_parameters(experts.build().hybrid)
    assert counts.total - counts.active == 2 * 2 * (2 * 32 * 24)  # two layers, two of four experts, two matrices


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("olmoe-1b-7b", 6.9, 1.3),
        ("qwen3-30b-a3b", 30.5, 3.35),
        ("granite3-1b-a400m", 1.33, 0.43),
        ("dots1", 142.8, 14.0),
        ("nemotron3-nano-30b-a3b", 31.6, 3.6),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(name, total, active):
    """In billions, as papers and model cards have them."""
    counts = count_parameters(meta_model(load_config(find_config(f"pretrain/{name}")).model))
    assert counts.total / 1e9 == pytest.approx(total, rel=0.01) and counts.active / 1e9 == pytest.approx(
        active, rel=0.02
    )


def test_presets_balance_each_layer():
    """They begin with random weights, of which a loss over the whole model would let each layer use a few of its experts."""
    found = 0
    for file in sorted((ROOT / "yamls" / "pretrain").glob("*.yaml")):
        for name, block in load_config(file).model.blocks.items():
            if isinstance(mlp := getattr(block, "mlp", None), ExpertsSection):
                balance, found = mlp.balance, found + 1
                by_loss = balance.weight > 0 and balance.over == "layer"
                assert by_loss or mlp.router.bias_rate > 0, f"{file.name}: {name}"
    assert found > 10


def test_biases_are_not_decayed_and_matrices_are_each_experts():
    config = experts.config(bias=True, activation="swiglu")
    model = experts.HybridLM(config, platform.cpu())
    infos = {info.name: info for info in parameter_info(model).values()}
    assert infos["blocks.0.mlp.experts.w_in"].matrix_rows == (24, 24) and infos["blocks.0.mlp.experts.w_in"].decay
    assert infos["blocks.0.mlp.experts.w_out"].matrix_rows == (32,)
    assert not infos["blocks.0.mlp.experts.b_in"].decay and not infos["blocks.0.mlp.experts.b_in"].matrix_rows


REFUSED = [
    ({"top_k": 6}, "top_k", "exceeds n_experts (5)"),
    ({"router": {"groups": 2}}, "router.groups", "does not divide n_experts (5)"),
    ({"router": {"groups": 5}}, "router.groups", "leaves one expert to a group"),
    (
        {"n_experts": 6, "top_k": 3, "router": {"groups": 3}},
        "top_k",
        "exceeds the experts in router.top_groups of router.groups (2)",
    ),
    ({"router": {"top_groups": 2}}, "top_groups", "exceeds groups (1)"),
    ({"router": {"bias_rate": 0.1}}, "bias_rate", "set choice_bias: true"),
    ({"shared_gate": True}, "shared_gate", "give `shared` a d_ff"),
    ({"router": {"jitter": 1.0}}, "jitter", "less than 1"),
    ({"top_k": 0}, "top_k", "greater than 0"),
    ({"router": {"type": "expert_choice"}}, "type", "softmax"),
    ({"n_expert": 3}, "n_expert", "not permitted"),
    ({"balance": 0.1}, "balance", "dictionary"),
]


@pytest.mark.parametrize(("settings", "path", "reason"), REFUSED)
def test_rejects_settings_that_do_not_fit(settings, path, reason):
    with pytest.raises(ValidationError) as error:
        layer(**settings)
    assert path in str(error.value) and reason in str(error.value)


def test_rejects_widths_that_grouped_mm_cannot_take():
    def found(**settings: Any) -> list[tuple[str, str]]:
        return [(one.path, one.message) for one in backend_problems(experts.config(backend="grouped_mm", **settings))]

    assert not found()
    [(path, reason), *_] = found(d_ff=20)
    assert path == "blocks.a.mlp.backend"
    assert "needs rows of whole 16 bytes, and d_ff = 20 are 40; use a multiple of 8" in reason and "reference" in reason


def test_rejects_layers_that_cannot_be_counted_together():
    plain = experts.config().model_dump()
    for block in ("a", "m"):
        plain["blocks"][block]["mlp"]["balance"]["over"] = "model"
    plain["blocks"]["m"]["mlp"]["n_experts"] = 8
    with pytest.raises(ValidationError, match="a and m differ in n_experts or top_k; use layer"):
        ModelConfig.model_validate(plain)
