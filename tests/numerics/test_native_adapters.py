"""Adapters of a shared block's uses, merged into the published class' own of each use: the class alone computes what peft does."""

import random

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmtrain.convert.export import export
from llmtrain.convert.import_hf import import_adapters, import_hf
from llmtrain.errors import UserError
from tests.support import checkpoints, hf, hf_families

PEER = hf_families.ZAMBA2


def published(tmp_path, attention: bool, targets: str, **settings):
    """Folders of a base with two shared blocks in three uses and of peft's adapters of it; the class with these."""
    rng, tokenizer = random.Random(f"{hf.SEED} native {targets}"), checkpoints.tokenizer()
    kinds = ["hybrid", "linear_attention", "hybrid", "hybrid"]
    keys = PEER.draw(rng, int(attention)) | {"layers_block_type": kinds, "num_hidden_layers": 4, "num_mem_blocks": 2}
    keys |= {"tie_word_embeddings": True}
    case = hf.Case(PEER.config(vocab_size=tokenizer.rows_needed, **keys), 2, 9, 1)
    hf.random_peer(case, PEER.model).save_pretrained(tmp_path / "published")
    tokenizer.save(tmp_path / "published")
    import_hf(str(tmp_path / "published"), tmp_path / "base")
    theirs = peft.get_peft_model(
        hf.random_peer(case, PEER.model),
        peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=7, target_modules=targets, **settings),
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "theirs")
    import_adapters(tmp_path / "theirs", tmp_path / "ours", str(tmp_path / "base"))
    return case, theirs.eval()


@pytest.mark.parametrize(
    ("attention", "targets"),
    [
        (True, r".*shared_transformer.self_attn.(q|v)_proj|.*gate_up_proj"),
        (True, r".*layers\.(0|3)\.shared_transformer.self_attn.(q|k)_proj|.*mamba.in_proj"),
        (False, r".*layers\.(2|3)\..*gate_up_proj"),  # of 2 alone: into the block's weight,
    ],
)
def test_adapters_of_uses_are_merged_into_native_ones(attention, targets, tmp_path):
    case, theirs = published(tmp_path, attention, targets)
    export(tmp_path / "ours", tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.config.adapter_rank == case.config.adapter_rank + 3
    tokens = hf.tokens_of(case, case.seq_len)
    with torch.no_grad():
        assert hf.distance(hf.logits_of(merged, tokens), hf.logits_of(theirs, tokens)) < 1e-5
    import_hf(str(tmp_path / "merged"), tmp_path / "again")


@pytest.mark.parametrize(
    ("attention", "targets", "settings"),
    [
        (True, r".*shared_transformer.self_attn.o_proj", {}),
        (True, r".*gate_up_proj", {"use_dora": True}),
        (False, r".*shared_transformer.self_attn.q_proj", {}),
    ],
)
def test_others_are_refused_with_the_targets_that_merge(attention, targets, settings, tmp_path):
    published(tmp_path, attention, targets, **settings)
    with pytest.raises(UserError, match=r"but for \*.shared_input.mlp.w_in and \*.shared_input.mixer.wqkv"):
        export(tmp_path / "ours", tmp_path / "merged", merge=True)
