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
from llmtrain.adapt.peft_names import published_layers
from llmtrain.adapt.peft_read import attach, read_peft
from llmtrain.convert.export import export
from llmtrain.convert.import_hf import import_adapters, import_hf
from llmtrain.errors import UserError
from llmtrain.generate.load import load_model
from llmtrain.kernels.platform import cpu
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hf.family import family_of_hf_config
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.layer_part import persistent_buffers
from tests.support import checkpoints, hf, hf_families

DRAWS = 8
TOLERANCE = 1e-5
OFTEN = ("llama", "qwen3", "olmo_hybrid", "zamba2", "nemotron_h", "falcon_h1", "qwen3_moe experts")
# Dense layers of qwen3_next are in no folder: peft takes their names for those of experts, which this one does not have.
PEERS = {name: peer for name, peer in hf_families.PEERS.items() if name != "qwen3_next"}
CASES = [(name, number) for name in PEERS for number in range(DRAWS)]
LEFT_OUT: dict[str, tuple[str, ...]] = {
    # peft refuses it: the class reads its weights past the adapter in a fused kernel of GPUs; ours calls it.
    **dict.fromkeys(("mamba2", "nemotron_h", "nemotron_h experts", "falcon_h1"), ("out_proj",)),
    "zaya experts": ("v_proj_current", "v_proj_delayed"),  # one part here
}


def marks(name: str, number: int) -> list[pytest.MarkDecorator]:
    """One draw of each class by default, of the kinds (number % 3) in turn."""
    if number == list(PEERS).index(name) % 3:
        return []
    return [pytest.mark.ci if number < 3 and name in OFTEN else pytest.mark.slow]


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
    left = {*LEFT_OUT.get(name, ()), *([] if not dora and not case.config.tie_word_embeddings else ["lm_head"])}
    linears = {
        path: module
        for path, module in peer.named_modules()
        if isinstance(module, nn.Linear)
        and (last := path.rpartition(".")[2]) not in left
        and not last.isdigit()
        and ".gate." not in path
    }
    shapes = [
        *(module.weight.shape for module in linears.values()),
        *(peer.get_parameter(path).shape[1:] for path in parameters),
    ]
    least = min(map(min, shapes))
    rank = rng.randint(1, max(1, min(least // 2 if parameters else least, 4)))  # peft doubles that of gate_up_proj
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


@pytest.mark.parametrize(
    ("name", "number"), [pytest.param(*case, marks=marks(*case), id="-".join(map(str, case))) for case in CASES]
)
def test_adapters_compute_as_peft_does_and_come_back_to_the_same_bits(name, number, tmp_path):
    case = case_of(name, number)
    family = family_of_hf_config({"model_type": name.removesuffix(" experts")})
    theirs = with_peft(name, case, number)
    theirs.save_pretrained(tmp_path)
    ours = hf.ours_in_memory(plain_copy(name, case))
    adapters = read_peft(tmp_path, ours.config, family.model_type)
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
        if what == "gradients":
            add_copies(tensors, lora, ours.config, family)
        write_peft(folder, lora, tensors, ours.config, family, None)
    written, saved = load_file(tmp_path / "values" / WEIGHTS), load_file(tmp_path / WEIGHTS)
    saved = {n: t for n, t in saved.items() if not n.endswith(".base_layer.weight")}
    assert written.keys() == saved.keys() and all(torch.equal(written[n], t) for n, t in saved.items())
    again = read_peft(tmp_path / "values", ours.config, family.model_type)
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
        add_copies(added, lora, ours.config, family)
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


@pytest.mark.parametrize("name", ["helium", "ernie4_5"])
def test_adapters_of_an_imported_base_have_the_rows_of_its_class(name, tmp_path):
    """Its parameters are Llama's too, by names and shapes, in another order of rows."""
    keys, tokenizer = PEERS[name].draw(random.Random(f"{hf.SEED} {name}"), 0), checkpoints.tokenizer()
    case = hf.Case(PEERS[name].config(vocab_size=tokenizer.rows_needed, **keys), 2, 9, 1)
    plain_copy(name, case).save_pretrained(tmp_path / "published")
    tokenizer.save(tmp_path / "published")
    theirs = with_peft(name, case, 0)
    theirs.save_pretrained(tmp_path / "theirs")
    import_hf(str(tmp_path / "published"), tmp_path / "base")
    import_adapters(tmp_path / "theirs", tmp_path / "ours", str(tmp_path / "base"))
    tokens = hf.tokens_of(case, case.seq_len)
    for source, adapter in (("base", "theirs"), ("published", "theirs"), ("ours", None)):
        model, _ = load_model(str(tmp_path / source), torch.float32, adapter=adapter and str(tmp_path / adapter))
        with torch.no_grad():
            assert hf.distance(model.logits(tokens), hf.logits_of(theirs, tokens)) < TOLERANCE
    export(tmp_path / "ours", tmp_path / "again")
    written, saved = load_file(tmp_path / "again" / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in written.items())
    assert export(tmp_path / "base", tmp_path / "whole").architecture == PEERS[name].family.architecture


def add_copies(gradients: dict[str, Tensor], lora: Lora, config: Any, family: Any) -> None:
    """Where peft has one A of what is several parts here, of which each has a copy, its gradient is the sum of theirs."""
    for layer in published_layers(config, family):
        units = lora.adapters.get(layer.site.place, (layer.site, []))[1]
        name = f"{layer.site.place}.down.weight"
        if not (layer.is_embedding or layer.is_experts) and layer.covered(units):
            copies = gradients[name].split([unit.rank for unit in units])
            covered = [i for i, unit in enumerate(units) if unit in layer.covered(units)]
            total = torch.stack([copies[i] for i in covered]).sum(0)
            gradients[name] = torch.cat([total if i in covered else copy for i, copy in enumerate(copies)])


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
