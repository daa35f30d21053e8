"""Losses that arise inside layers, and sums over a step, with layers of experts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.flops.count import count_parameters
from llmtrain.generate.decoding import decode
from llmtrain.generate.sampling import Sampling
from llmtrain.models.attached_loss import AttachedLosses, attach_loss
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.layer_part import parts_of, step_sums
from llmtrain.models.parameters import parameter_info
from llmtrain.schema.training import ActivationCheckpointing
from llmtrain.train.parallel import checkpoint_activations, compile_layers
from tests.support import experts
from tests.support.models import VOCAB

BALANCE, Z_LOSS = 0.3, 0.02
OVER_LAYERS = {"balance": {"weight": BALANCE}, "z_loss": Z_LOSS}
OVER_MODEL = {"balance": {"weight": BALANCE, "over": "model"}, "z_loss": Z_LOSS}
LABELS = (40, 17, 3)
"""Labels of each microbatch of [2, 20] tokens."""


def microbatches() -> list[tuple[Tensor, Tensor]]:
    made, g = [], torch.Generator().manual_seed(3)
    for count in LABELS:
        ids, labels = torch.randint(VOCAB, (2, 2, 20), generator=g)
        labels.view(-1)[count:] = -100
        made.append((ids, labels))
    return made


def step(model: CausalLM) -> dict[str, Tensor]:
    """The gradients of a step by the way of training, each microbatch's loss weighted by its share of the labels."""
    for ids, labels in microbatches():
        out = model.loss(ids, labels)
        (out.loss * (out.n_tokens / sum(LABELS))).backward()
    return gradients(model)


def gradients(model: CausalLM) -> dict[str, Tensor]:
    names = parameter_info(model.hybrid)
    return {info.name: p.grad for p, info in names.items() if p.grad is not None}


def expected(model: CausalLM) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """Gradients of a step whose loss has the auxiliary terms written out, the terms' sum, and tokens by expert of each layer."""
    total, inputs, loads = torch.zeros(()), [], {}
    layers: dict[str, Any] = {name: part for name, part in parts_of(model.hybrid) if name.endswith("mlp")}
    layers = {name: layer for name, layer in layers.items() if layer.losses}
    [*_, layer] = layers.values()
    hooks = [layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for layer in layers.values()]
    sum_of_terms = 0.0
    for ids, labels in microbatches():
        inputs.clear()
        context = model.context(ids)
        context = replace(context, blocks=[replace(one, losses=None) for one in context.blocks], losses=None)
        out = model(ids, context, lambda hidden, head, labels=labels: model.cross_entropy(hidden, head, labels))
        logits = [x.flatten(0, 1) @ layer.router.weight.T for layer, x in zip(layers.values(), inputs, strict=True)]
        picked = [F.one_hot(one.topk(2).indices, 4).sum(1).float() for one in logits]
        if (
            layer.section.balance.over == "model"
        ):  # as transformers has it: of all layers' tokens, without a division by top_k
            terms = BALANCE * 4 * (torch.cat(picked).mean(0) * torch.cat(logits).softmax(-1).mean(0)).sum()
        else:
            pairs = zip(picked, logits, strict=True)
            terms = BALANCE * 4 * sum(((p.mean(0) / 2) * one.softmax(-1).mean(0)).sum() for p, one in pairs)
        loads = {name: loads.get(name, 0) + p.sum(0) for name, p in zip(layers, picked, strict=True)}
        z_loss = sum(Z_LOSS * one.logsumexp(-1).square().mean() for one in logits)
        share = out.n_tokens / sum(LABELS)
        total = total + share * (out.loss + terms + z_loss)
        sum_of_terms += float((share * terms).detach())
    total.backward()
    for hook in hooks:
        hook.remove()
    return gradients(model), sum_of_terms, loads


@pytest.fixture(scope="module", params=[OVER_LAYERS, OVER_MODEL], ids=["layer", "model"])
def plainly(request) -> tuple[dict[str, Any], tuple[dict[str, Tensor], float, dict[str, Tensor]]]:
    return request.param, expected(experts.build(**request.param))


@pytest.mark.parametrize("kind", ["none", "full", "selective", "kernels"])
def test_gradients_are_those_of_a_loss_with_the_term_written_out(kind, plainly):
    settings, (wanted, term, loads) = plainly
    model = experts.build(**settings)
    checkpoint_activations(model.hybrid, ActivationCheckpointing(type=kind))
    found = step(model)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    assert model.hybrid.losses is not None and len(LABELS) > 1
    assert float(model.hybrid.losses.terms["balance"]) == pytest.approx(term, rel=1e-5)
    torch.testing.assert_close(step_sums(model), list(loads.values()))  # once, whatever is computed again
    assert (
        wanted["blocks.0.mlp.router.weight"]
        - step(experts.build(balance={"weight": 0.0}))["blocks.0.mlp.router.weight"]
    ).norm() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "full"])
def test_the_same_where_layers_are_compiled(kind, plainly):
    settings, (wanted, term, loads) = plainly
    model = experts.build(**settings)
    checkpoint_activations(model.hybrid, ActivationCheckpointing(type=kind))
    compile_layers(model.hybrid)
    torch.testing.assert_close(step(model), wanted, atol=1e-5, rtol=1e-4)
    assert float(model.hybrid.losses.terms["balance"]) == pytest.approx(term, rel=1e-5)  # type: ignore[union-attr]
    torch.testing.assert_close(step_sums(model), list(loads.values()))


def test_nothing_is_attached_or_counted_without_a_backward_pass():
    model = experts.build()
    [(ids, labels), *_] = microbatches()
    with torch.no_grad():
        model.eval().loss(ids, labels)
    assert not any(total.any() for total in (*step_sums(model), *model.hybrid.losses.terms.values()))  # type: ignore[union-attr]


def test_a_loss_without_a_place_is_left_out():
    x = torch.ones(2, requires_grad=True)
    assert attach_loss(x, x.sum(), None, "balance") is x
    losses = AttachedLosses.named(["balance"], x.device)
    with torch.no_grad():
        assert attach_loss(x, x.sum(), losses, "balance") is x
    attach_loss(3 * x, x.square().sum(), losses, "balance").sum().backward()  # weight 1, as `weigh` was not asked
    assert x.grad is not None and x.grad.tolist() == [5, 5] and losses.terms["balance"] == 2
    losses.reset()
    assert losses.terms["balance"] == 0


def test_a_model_without_losses_has_none():
    model = experts.build()
    assert model.context(torch.zeros(1, 4, dtype=torch.int64)).losses is not None
    dense = CausalLM(type(model.hybrid)(experts.config().model_copy(update={"layers": "d"}), model.hybrid.platform))
    assert dense.context(torch.zeros(1, 4, dtype=torch.int64)).losses is None and not step_sums(dense)


def test_layers_without_a_loss_count_their_tokens():
    """By which `bias_rate` balances them."""
    model = experts.build(router=experts.BIASED, balance={"weight": 0.0})
    ids = torch.arange(12)[None]
    model.loss(ids, ids).loss.backward()
    layers: Any = [block.mlp for block in list(model.hybrid.blocks)[:2]]
    assert [float(layer.load.sum()) for layer in layers] == [24, 24]  # each of two experts
    for layer in layers:
        layer.after_step()
        assert layer.choice_bias.any() and not any(value.isnan() for value in layer.metrics().values())


def test_the_router_stays_fp32_and_is_decayed_and_counted():
    model = experts.build()
    model.hybrid.cast(torch.bfloat16)
    infos = {info.name: info for info in parameter_info(model.hybrid).values()}
    weights = dict(model.hybrid.named_parameters())
    assert {name for name, weight in weights.items() if weight.dtype == torch.float32} >= {"blocks.0.mlp.router.weight"}
    assert weights["blocks.0.mlp.experts.w_in"].dtype == torch.bfloat16
    assert infos["blocks.0.mlp.router.weight"].fp32 and infos["blocks.0.mlp.experts.w_in"].decay
    counts = count_parameters(model.hybrid)
    assert counts.total - counts.active == 2 * 2 * (2 * 32 * 24)  # two layers, two of four experts, two matrices
    ids = torch.arange(12)[None]
    assert model.logits(ids).dtype == torch.bfloat16


def test_decodes_with_a_cache_as_without():
    model = experts.build().eval()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    steps = decode(model, [prompt], Sampling(temperature=0.0), max_new_tokens=6)
    tokens = [one[0] for one in steps]
    for i, token in enumerate(tokens):
        ids = torch.tensor([[*prompt, *tokens[:i]]])
        assert model.logits(ids)[0, -1].argmax() == token


def test_after_step_lowers_the_score_of_loaded_experts():
    layer: Any = experts.build(router=experts.BIASED).hybrid.blocks[0].mlp
    layer.load.copy_(torch.tensor([4.0, 0.0, 2.0, 2.0]))
    layer.after_step()
    assert layer.choice_bias.tolist() == [-0.5, 0.5, 0, 0]
    found = {name: float(value) for name, value in layer.metrics().items()}
    assert found["load_max"] == 2 and found["load_min"] == 0 and found["load_entropy"] == pytest.approx(0.75)
    assert [found[f"load_{i}"] for i in range(4)] == [0.5, 0, 0.25, 0.25]
