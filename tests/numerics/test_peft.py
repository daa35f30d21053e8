"""Adapters against peft's of the same published class: logits, every gradient, folders to the same bits, merged weights."""

import random
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from llmtrain.adapt.base import converters_of
from llmtrain.adapt.lora import Lora
from llmtrain.adapt.peft_folder import WEIGHTS, write_peft
from llmtrain.adapt.peft_read import attach, read_peft
from llmtrain.errors import UserError
from llmtrain.kernels.platform import cpu
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hf.family import family_of_hf_config
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.layer_part import persistent_buffers
from tests.support import hf, hf_families

DRAWS = 8
TOLERANCE = 1e-5
PEERS = {
    **{name: hf_families.PEERS[name] for name in ("llama", "qwen3", "olmo_hybrid", "zamba2", "nemotron_h")},
    **{name: hf_families.PEERS[f"{name} experts"] for name in ("mixtral", "olmoe", "qwen3_moe", "granitemoe", "dots1")},
    **{name: hf_families.PEERS[name] for name in ("nemotron_h experts", "falcon_h1")},
}
REFUSED_BY_PEFT: dict[str, str] = dict.fromkeys(("nemotron_h", "nemotron_h experts", "falcon_h1"), "out_proj")
"""Its class reads their weights past the adapter in a fused kernel of GPUs; ours calls them."""


def case_of(name: str, number: int) -> hf.Case:
    rng = random.Random(f"{hf.SEED} peft {name} {number}")
    keys = PEERS[name].draw(rng, number)
    keys |= {"router_aux_loss_coef": 0.0} if "router_aux_loss_coef" in keys else {}  # no part of the class' loss
    return hf.Case(PEERS[name].config(vocab_size=hf.VOCAB, **keys), 2, rng.randint(3, 24), rng.randrange(2**31))


def with_peft(name: str, case: hf.Case, number: int) -> Any:
    """The class with adapters of peft, all away from their initial values."""
    rng = random.Random(case.seed)
    peer = plain_copy(name, case)
    parameters = [path for path, one in peer.named_parameters() if one.ndim == 3 and ".experts." in path]
    if number % 3 == 2:
        parameters = [path for path in parameters if path.endswith("down_proj")]  # is not wrapped in another
    dora = number % 3 == 2 and not parameters
    left = {REFUSED_BY_PEFT.get(name), *([] if not dora and not case.config.tie_word_embeddings else ["lm_head"])}
    linears = {
        path: module
        for path, module in peer.named_modules()
        if isinstance(module, nn.Linear) and (last := path.rpartition(".")[2]) not in left and not last.isdigit()
    }
    shapes = [
        *(module.weight.shape for module in linears.values()),
        *(peer.get_parameter(path).shape[1:] for path in parameters),
    ]
    least = min(map(min, shapes))
    rank = rng.randint(1, min(least, 4))
    targets = [*linears, *([] if dora else [path for path, m in peer.named_modules() if isinstance(m, nn.Embedding)])]
    other = rng.choice(list(linears))
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=rng.choice([1, 3, 16]),
        target_modules=targets,
        use_rslora=number % 3 == 1,
        use_dora=dora,
        target_parameters=parameters or None,
        rank_pattern={other: 1} | dict.fromkeys(parameters[-1:], 1),
        alpha_pattern={rng.choice(list(linears)): 5},
    )
    torch.manual_seed(case.seed)
    found = peft.get_peft_model(peer, settings)
    with torch.no_grad():
        for path, parameter in found.named_parameters():
            if "lora_magnitude" in path:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
            elif "lora_" in path:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return found.eval()


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of a tensor, in norms of it or of a thousandth of all."""
    total = torch.stack([t.norm() for t in theirs.values()]).norm()
    return max(float((ours[n] - t).norm() / max(t.norm(), hf.SMALL * total)) for n, t in theirs.items())


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(
    "number",
    [*range(3), *(pytest.param(n, marks=pytest.mark.ci if n < 5 else pytest.mark.slow) for n in range(3, DRAWS))],
)
def test_adapters_compute_as_peft_does_and_come_back_to_the_same_bits(name, number, tmp_path):
    case = case_of(name, number)
    family = family_of_hf_config({"model_type": name.removesuffix(" experts")})
    theirs = with_peft(name, case, number)
    theirs.save_pretrained(tmp_path)
    ours = hf.ours_in_memory(plain_copy(name, case))
    adapters = read_peft(tmp_path, ours.config)
    attach(ours, adapters)
    model, tokens = CausalLM(ours), hf.tokens_of(case, case.seq_len + 1)

    with torch.no_grad():
        assert hf.distance(model.logits(tokens), hf.logits_of(theirs, tokens)) < TOLERANCE
    model.loss(tokens[:, :-1], tokens[:, 1:].contiguous()).loss.backward()
    expected = {n: g for n, g in hf.their_gradients(theirs, tokens).items() if "lora_" in n}
    assert all((p.grad is not None) == (".lora." in n) for n, p in ours.named_parameters())

    [lora] = [one for one in converters_of(ours.config, adapters.adapt) if isinstance(one, Lora)]
    for what in ("values", "gradients"):
        folder = tmp_path / what
        folder.mkdir()
        added = {n: p for n, p in ours.named_parameters() if p.requires_grad}
        tensors = {n: p.detach() if what == "values" else gradient(p) for n, p in added.items()}
        write_peft(folder, lora, tensors, ours.config, family, None)
    written, saved = load_file(tmp_path / "values" / WEIGHTS), load_file(tmp_path / WEIGHTS)
    saved = {n: t for n, t in saved.items() if not n.endswith(".base_layer.weight")}
    assert written.keys() == saved.keys() and all(torch.equal(written[n], t) for n, t in saved.items())
    again = read_peft(tmp_path / "values", ours.config)
    assert again.adapt == adapters.adapt
    gradients = load_file(tmp_path / "gradients" / WEIGHTS)
    named = {n.replace(".default", "").removesuffix(".weight"): g for n, g in expected.items()}
    found = {n.removesuffix(".weight"): g for n, g in gradients.items()}
    assert found.keys() == named.keys()
    if apart(found, named) >= TOLERANCE:  # where fp32's rounding weighs more, ours is as near to fp64's as peft's
        wide = hf.ours_in_memory(plain_copy(name, case), torch.float64)
        attach(wide, adapters)
        CausalLM(wide).loss(tokens[:, :-1], tokens[:, 1:].contiguous()).loss.backward()
        added = {n: gradient(p) for n, p in wide.named_parameters() if p.requires_grad}
        (tmp_path / "wide").mkdir()
        write_peft(tmp_path / "wide", lora, added, ours.config, family, None)
        exact = {n.removesuffix(".weight"): g for n, g in load_file(tmp_path / "wide" / WEIGHTS).items()}
        total = torch.stack([g.norm() for g in exact.values()]).norm()
        none = [n for n, g in exact.items() if g.norm() < 1e-12 * total]  # of queries that see one key, say
        assert all(found[n].norm() < 1e-7 * total for n in none)
        found, named, exact = ({n: g for n, g in some.items() if n not in none} for some in (found, named, exact))
        assert apart(found, exact) < max(TOLERANCE, 2 * apart({n: g.double() for n, g in named.items()}, exact)) < 1e-3

    merged_is_unmerged(ours, lora, adapters, tokens)
    reloaded = peft.PeftModel.from_pretrained(plain_copy(name, case), str(tmp_path / "values"))
    with torch.no_grad():
        assert torch.equal(hf.logits_of(reloaded, tokens), hf.logits_of(theirs, tokens))


def plain_copy(name: str, case: hf.Case) -> Any:
    untied = name == "zamba2" and hf_families.unties_shared_blocks(case.config)
    return hf.random_peer(case, PEERS[name].model, tie_parameters if untied else None)


def tie_parameters(peer: Any) -> None:
    """The weights of a shared block are the same in all its uses; its modules, which peft gives adapters, are not."""
    hybrid = [layer.shared_transformer for layer in peer.model.layers if hasattr(layer, "shared_transformer")]
    for i, use in enumerate(hybrid):
        for name, parameter in hybrid[i % peer.config.num_mem_blocks].named_parameters():
            owner, _, leaf = name.rpartition(".")
            setattr(use.get_submodule(owner), leaf, parameter)


def merged_is_unmerged(ours: Any, lora: Lora, adapters: Any, tokens: Tensor) -> None:
    weights = {n: p.detach() for n, p in ours.named_parameters()}
    tied = ours.head is None and "embed" in adapters.adapt.lora.targets
    if lora.several or tied:
        with pytest.raises(UserError, match="Export the adapters"):
            lora.merged(weights)
        return
    plain = HybridLM(ours.config, cpu())
    plain.load_state_dict(lora.merged(weights) | persistent_buffers(ours))
    with torch.no_grad():
        assert hf.distance(CausalLM(plain.eval()).logits(tokens), CausalLM(ours).logits(tokens)) < TOLERANCE
