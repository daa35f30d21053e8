"""Random small models of transformers, ours made from them, and how far the two are apart."""

import json
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from llmtrain.generate.decoding import DecodeStep, decode, prefill
from llmtrain.generate.sampling import Sampling
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import Family, Weight
from llmtrain.models.hf.load import load_hf, model_from_tensors
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.layer_part import persistent_buffers

SEED = int(os.environ.get("LLMTRAIN_TEST_SEED", "20261121"))
CASES = 24
QUICK, FURTHER = (0, 3, 5), (1, 2, 4, 18, 19)
"""Of the cases, a single token, a chunk and several; the other lengths that are named, and two of random ones."""
VOCAB = 61
TOLERANCE = 1e-4
"""Norm of the difference over norm, fp32 on both sides."""
LARGEST = 5e-4
"""As TOLERANCE, of gradients where fp32's rounding weighs more: norms of a branch only 4 channels wide divide by small numbers."""
SMALL = 1e-3
"""A gradient of less than this share of all is held against this share: it is what is left of larger terms that cancel
(queries and keys of a single token; D where a norm follows), and fp32 leaves 1e-7 of those on either side."""

# Of config.json, what no model computes with: token ids and dtype are the exporter's, the rest is bookkeeping.
_BOOKKEEPING = {
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
    "use_cache",
    "_name_or_path",
}
# What the classes take where the keys are absent.
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


@dataclass
class Case:
    """A random config of one class, and the size of a batch for it."""

    config: Any
    batch: int
    seq_len: int
    seed: int


def random_case(
    name: str, draw: Callable[[random.Random, int], dict[str, Any]], config_class: Any, number: int
) -> Case:
    """The case of this number, below CASES. draw: a generator and the case's number -> arguments of the config class."""
    rng = random.Random(f"{SEED} {name} {number}")
    config = config_class(vocab_size=VOCAB, **draw(rng, number))
    chunk = getattr(config, "chunk_size", 16)
    seq_len = [1, 2, chunk - 1, chunk, chunk + 1, 37][number % 6] if number < 18 else rng.randint(1, 48)
    return Case(config, rng.choice([2, 3]), seq_len, rng.randrange(2**31))


def every_case(names: Iterable[str], numbers: Iterable[int] = range(CASES)) -> pytest.MarkDecorator:
    """(name, number) of these cases; those that are not QUICK are tests of the CI, or slow ones."""
    marks = [[] if i in QUICK else [pytest.mark.ci if i in FURTHER else pytest.mark.slow] for i in range(CASES)]
    return pytest.mark.parametrize(
        ("name", "number"),
        [pytest.param(name, i, id=f"{name}-{SEED}-{i}", marks=marks[i]) for name in names for i in numbers],
    )


def published_config(config: Any) -> dict[str, Any]:
    """Content of config.json as save_pretrained writes it."""
    return json.loads(config.to_json_string())


def random_peer(case: Case, model_class: Any, tie: Callable[[Any], None] | None = None) -> Any:
    """A model with every weight away from its initial value, so that none can be swapped or dropped unseen. tie: done before."""
    torch.manual_seed(case.seed)
    peer = (
        model_class._from_config(case.config, attn_implementation="eager", experts_implementation="eager")
        .float()
        .eval()
    )
    if tie is not None:
        tie(peer)
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(math.log(0.3), math.log(4.0))
            elif name.endswith("dt_bias"):
                parameter.uniform_(-3.0, 1.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in peer.named_buffers():  # biases of the choice of experts
            if name.endswith("balancing_biases"):
                buffer[-1] = 0.0  # else no token would choose to meet no expert
            if name.endswith(("e_score_correction_bias", "balancing_biases")):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return peer


def tokens_of(case: Case, length: int | None = None, batch: int | None = None) -> Tensor:
    """Random tokens, not 0, which Zamba2 takes for padding and learns nothing about."""
    generator = torch.Generator().manual_seed(case.seed)
    return torch.randint(1, VOCAB, (batch or case.batch, length or case.seq_len), generator=generator)


def our_config(family: Family, config: Any) -> ModelConfig:
    return ModelConfig.model_validate(family.read_config(published_config(config)))


def ours_in_memory(peer: Any, dtype: torch.dtype | None = None) -> HybridLM:
    tensors = revert_weight_conversion(peer, peer.state_dict())  # by their names in files
    return model_from_tensors(published_config(peer.config), tensors, platform.cpu(), dtype)


def ours_from_folder(peer: Any, folder: Path, **save: Any) -> HybridLM:
    peer.save_pretrained(folder, **save)
    return load_hf(folder, platform=platform.cpu())


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over norm."""
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def logits_of(peer: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    return peer(tokens, attention_mask=mask, use_cache=False).logits


def logits_apart(ours: HybridLM, peer: Any, tokens: Tensor) -> float:
    with torch.no_grad():
        theirs = logits_of(peer, tokens)
        assert theirs.std() > 0.01
        return distance(CausalLM(ours).logits(tokens), theirs)


def our_gradients(family: Family, ours: HybridLM, names: Mapping[str, Any], tokens: Tensor) -> dict[str, Tensor]:
    """Gradients of the mean next-token loss by published name, as spelt in `names`. tokens: [batch, T + 1]."""
    ours.zero_grad()
    # Without the losses that layers attach, which the class leaves out too.
    ours._loss_names, ours._counts, ours.losses = [], False, None
    CausalLM(ours).loss(tokens[:, :-1], tokens[:, 1:].contiguous()).loss.backward()
    found: dict[str, Tensor] = {}
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for weight in (weight for weight in family.weights(ours.config) if weight.ours in gradients):
        gradient = gradients.pop(weight.ours)
        assert gradient is not None, weight.ours
        constants = {part.name for part in weight.parts if part.value is not None}
        found |= {name: part for name, part in weight.split(gradient).items() if name not in constants}
    assert not gradients
    found = by_names_in(names, found, family.weights(ours.config))
    assert found.keys() == names.keys()
    return found


def their_gradients(peer: Any, tokens: Tensor) -> dict[str, Tensor]:
    peer.zero_grad()
    F.cross_entropy(logits_of(peer, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {name: parameter.grad for name, parameter in peer.named_parameters()}


def assert_same_gradients(family: Family, ours: HybridLM, peer: Any, tokens: Tensor) -> None:
    """Every gradient within the tolerance of the class's; or, where fp32's rounding weighs more, apart by less than LARGEST, and as
    near to ours in fp64 as the class's is, or as that comes where the weights alone are rounded, or less than SMALL says.
    tokens: [batch, T + 1]."""
    theirs = their_gradients(peer, tokens)
    found = our_gradients(family, ours, theirs, tokens)
    total = math.sqrt(sum(float(g.norm()) ** 2 for g in theirs.values()))

    def apart(one: Tensor, name: str, other: Tensor) -> float:
        return float((one - other).norm()) / max(float(theirs[name].norm()), SMALL * total)

    off = {name: d for name, g in theirs.items() if not (d := apart(found[name], name, g)) < TOLERANCE}
    if off:
        wide = our_gradients(family, ours_in_memory(peer, torch.float64), theirs, tokens)
        errors = {name: (apart(found[name], name, wide[name]), apart(theirs[name], name, wide[name])) for name in off}
        moved = [rounded_gradients(family, peer, theirs, tokens, seed) for seed in range(4)]
        by_rounding = {name: max(apart(one[name], name, wide[name]) for one in moved) for name in off}
        # With a single token the class's are 0 to the bit, ours what is left of two sums in another order.
        near = {
            name: mine < max(2 * its, 4 * by_rounding[name]) or float(theirs[name].norm()) < SMALL * total
            for name, (mine, its) in errors.items()
        }
        assert all(d < LARGEST for d in off.values()) and all(near.values()), (off, errors, by_rounding)


def rounded_gradients(
    family: Family, peer: Any, names: Mapping[str, Any], tokens: Tensor, seed: int
) -> dict[str, Tensor]:
    """Our gradients in fp64 where each weight is moved by up to a unit in the last place of fp32."""
    ours, generator = ours_in_memory(peer, torch.float64), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in ours.parameters():
            off = 2 * torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) - 1
            parameter.mul_(1 + torch.finfo(torch.float32).eps * off)
    return our_gradients(family, ours, names, tokens)


def written_config(family: Family, ours: HybridLM) -> dict[str, Any]:
    """Content of config.json with a token id, as the caller adds it: some classes take one beyond this vocabulary without."""
    return json.loads(json.dumps(family.write_config(ours.config))) | {"pad_token_id": None}


def by_names_in(names: Mapping[str, Any], tensors: dict[str, Tensor], weights: list[Weight]) -> dict[str, Tensor]:
    """Tensors by published name, each under the one of its spellings that is in `names`: a class may rename what it loads, and
    join convolutions of q, k and v."""
    spellings = {part.name: part.names for weight in weights for part in weight.parts}
    found = {next((s for s in spellings[name] if s in names), name): tensor for name, tensor in tensors.items()}
    for name in names:
        if name not in found and name.endswith(("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")):
            found[name] = _stacked(found, name)
        if name not in found and name.endswith(".router.weight"):
            found[name] = found.pop(name.replace(".router.", ".router.layer."))
        if name not in found and name.endswith(".mlp.gate.weight"):
            found[name] = found.pop(name.replace(".mlp.", ".block_sparse_moe."))
        if name not in found and name.endswith(".conv1d.weight"):
            found[name] = torch.cat([found.pop(name.replace(".conv1d.", f".{x}_conv1d.")) for x in "qkv"])
    return found


def _stacked(found: dict[str, Tensor], name: str) -> Tensor:
    """One tensor of a class for the matrices of all experts, of those in files, which are taken out of `found`."""
    module, _, kind = name.rpartition(".")
    for own, stacked in (("gate_up_proj", "input_linear"), ("down_proj", "output_linear")):
        if kind == own and (whole := f"{module.removesuffix('.experts')}.{stacked}.weight") in found:
            return found.pop(whole)
    kinds = {"gate_up_proj": ("gate_proj", "up_proj")}.get(kind, (kind,))
    spelt = [(module, dict(zip(kinds, kinds, strict=True)))]
    spelt += [(module.replace("model.layers", "backbone.layers"), spelt[0][1])]
    spelt += [(module.replace(".mlp.experts", ".block_sparse_moe.experts"), _MIXTRAL)]
    of, names = next((of, names) for of, names in spelt if f"{of}.0.{names[kinds[0]]}.weight" in found)
    count = sum(name.startswith(f"{of}.") and name.endswith(f".{names[kinds[0]]}.weight") for name in found)
    return torch.stack([torch.cat([found.pop(f"{of}.{i}.{names[one]}.weight") for one in kinds]) for i in range(count)])


_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def assert_same_function(family: Family, ours: HybridLM, peer: Any, case: Case) -> None:
    tokens = tokens_of(case, case.seq_len + 1)
    assert logits_apart(ours, peer, tokens[:, :-1]) < TOLERANCE
    assert_same_gradients(family, ours, peer, tokens)
    assert_same_from_cache(ours, peer, case)


def assert_same_from_cache(ours: HybridLM, peer: Any, case: Case) -> None:
    """Our cache gives, token by token, what the class gives for the whole text: logits for a given text, and greedy tokens.

    Its own cache is not asked: in transformers 5.23 a window of one token, and limits of time steps, are lost in some.
    """
    model, tokens, read = CausalLM(ours), tokens_of(case, 14, 2), 5
    cache = model.empty_cache(2, tokens.shape[1])
    with torch.no_grad():
        found = [prefill(model, cache, tokens[:, :read].tolist())]
        step = DecodeStep(model, cache, 0)
        found += [step(tokens[:, i]) for i in range(read, tokens.shape[1])]
        assert distance(torch.stack(found, 1), logits_of(peer, tokens)[:, read - 1 :]) < TOLERANCE
    prompts = tokens[:, :read]
    new = list(zip(*decode(model, prompts.tolist(), Sampling(temperature=0), max_new_tokens=8), strict=True))
    text = torch.cat([prompts, torch.tensor(new)], 1)
    with torch.no_grad():
        assert torch.equal(logits_of(peer, text[:, :-1])[:, read - 1 :].argmax(-1), text[:, read:])


def published_tensors(family: Family, ours: HybridLM) -> dict[str, Tensor]:
    parameters = {**dict(ours.named_parameters()), **persistent_buffers(ours)}
    made = [weight.split(parameters[weight.ours].detach()) for weight in family.weights(ours.config)]
    return {name: tensor for tensors in made for name, tensor in tensors.items()}


def export_to_folder(family: Family, ours: HybridLM, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written_config(family, ours)), encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in published_tensors(family, ours).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_back_is_equal(family: Family, ours: HybridLM, peer: Any, case: Case, other: frozenset[str]) -> None:
    """Our config and weights as a fresh model of the class: same config, same state dict, the same bits out.

    other: further keys of config.json that need not be equal.
    """
    config = type(case.config).from_dict(written_config(family, ours))
    fresh = type(peer)._from_config(config, attn_implementation="eager", experts_implementation="eager").float().eval()
    state = peer.state_dict()
    weights, published = family.weights(ours.config), published_tensors(family, ours)
    copies = {copy: part.name for weight in weights for part in weight.parts for copy in part.copies if copy in state}
    tied = {copy: published[name] for copy, name in copies.items()}
    fresh.load_state_dict(tied | by_names_in(state, published, weights), strict=True)
    assert_equal_models(fresh, peer, case, other)


def assert_export_loads(
    family: Family, ours: HybridLM, peer: Any, case: Case, folder: Path, other: frozenset[str]
) -> None:
    """Ours as a folder, read by from_pretrained without a key missing or left over."""
    export_to_folder(family, ours, folder)
    fresh, info = type(peer).from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert_equal_models(fresh.eval(), peer, case, other)


def assert_equal_models(fresh: Any, peer: Any, case: Case, other: frozenset[str]) -> None:
    theirs, found = peer.state_dict(), fresh.state_dict()
    assert found.keys() == theirs.keys()
    assert not [name for name, tensor in theirs.items() if not torch.equal(found[name], tensor)]
    tokens = tokens_of(case)
    with torch.no_grad():
        assert torch.equal(logits_of(fresh, tokens), logits_of(peer, tokens))
    before, after = (_compared(model.config, other) for model in (peer, fresh))
    differing = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert not differing, {key: (before.get(key), after.get(key)) for key in differing}


def _compared(config: Any, other: frozenset[str]) -> dict[str, Any]:
    content = config.to_diff_dict()
    kept = {key: value for key, value in content.items() if key not in _BOOKKEEPING | other}
    if rope := kept.get("rope_parameters"):
        by_type = {key: _with_defaults(value) for key, value in rope.items() if isinstance(value, dict)}
        kept["rope_parameters"] = by_type or _with_defaults(rope)
    return kept


def _with_defaults(rope: dict[str, Any]) -> dict[str, Any]:
    defaults = _YARN if rope.get("rope_type") == "yarn" else {}
    return defaults | {key: value for key, value in rope.items() if key != "type"}


def names_of(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Parameters and states of HybridLM(config) and their shapes, in order; nothing is allocated."""
    with torch.device("meta"):
        model = HybridLM(config, platform=platform.cpu())
    once = {*dict(model.named_parameters()), *persistent_buffers(model)}
    return [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items() if name in once]


def padding_apart(ours: HybridLM, peer: Any, case: Case, side: str) -> float:
    """Rows of several lengths in one batch with a mask on their side, against ours of each row alone; the worst row.

    With padding on the right also ours of the padded batch: what follows a token cannot change it.
    """
    lengths = [5, 11, 14]
    rows = [tokens_of(case, length, 1)[0] for length in lengths]
    tokens = torch.ones(len(rows), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    spans = [slice(0, n) if side == "right" else slice(max(lengths) - n, None) for n in lengths]
    for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
        tokens[i, span], mask[i, span] = row, 1
    with torch.no_grad():
        theirs = logits_of(peer, tokens, mask)
        alone = [CausalLM(ours).logits(row[None])[0] for row in rows]
        found = [distance(a, theirs[i, span]) for i, (a, span) in enumerate(zip(alone, spans, strict=True))]
        if side == "right":
            together = CausalLM(ours).logits(tokens)
            found += [distance(together[i, s], theirs[i, s]) for i, s in enumerate(spans)]
    return max(found)
