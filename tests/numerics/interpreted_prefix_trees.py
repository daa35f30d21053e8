"""Packed requests that share prefixes, scored with our kernels; run by test_attention_triton.py under TRITON_INTERPRET=1."""

import pytest
import torch

from benchmarks.harness.plan_work import work
from llmtrain.distributed.world import World
from llmtrain.eval.scoring.packed_plan import PackedPlan
from llmtrain.eval.scoring.scorer import HybridScorer
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.train.parallel import parallelize
from tests.support import interpreter
from tests.support.checkpoints import tokenizer
from tests.support.models import ALIBI, ATTENTION, LATENT, MODELS, PACKABLE, ROTARY, build
from tests.support.scoring import assert_same_scores, choices, letters, schemas, score_one_by_one, texts
from tests.support.tiny import tiny_config

interpreter.speed_up()
torch.set_num_threads(1)

LATENT_8 = LATENT | {"nope_dim": 8, "rope_dim": 8, "value_dim": 8, "position": ROTARY}
FURTHER = {
    "capped": {"blocks": {"a": ATTENTION | {"n_kv_heads": 2, "softcap": 5.0, "position": ALIBI}}, "layers": "a*2"},
    "with sinks": {"blocks": {"a": ATTENTION | {"n_kv_heads": 2, "sinks": True, "position": ROTARY}}, "layers": "a*2"},
    "latent": {"blocks": {"a": LATENT_8, "n": LATENT_8 | {"value_dim": 16, "q_rank": 7}}, "layers": "a n"},
}


def scored(model: CausalLM, requests, **options):
    made = HybridScorer(model, tokenizer(), packed=True, **options)
    found = made.loglikelihood(requests)
    assert isinstance(made.plan, PackedPlan)
    return found, made.plan


NAMES = [name for name in PACKABLE if "B" not in name]


@pytest.mark.parametrize(
    "name",
    [
        NAMES[0],
        *(pytest.param(name, marks=pytest.mark.ci) for name in NAMES[1:]),
        "capped",
        *(pytest.param(name, marks=pytest.mark.ci) for name in ("with sinks", "latent")),
        pytest.param("zamba2 as the 1.2B", marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_a_forward_pass_per_request(name, monkeypatch):
    if name in FURTHER:
        monkeypatch.setitem(MODELS, name, FURTHER[name])
    model = build(name, platform.cpu())
    assert "need a GPU" in (model.hybrid.prefix_refusal() or "")  # and nothing else
    few = 1 if "mamba" in str(MODELS[name]) else 2  # with all its heads, a scan takes long to interpret
    requests = [*choices(few + 1, shots=25), *letters(few, shots=30), *schemas(few), *texts(few)]
    expected = score_one_by_one(model.logits, requests)
    found, plan = scored(model, requests)
    assert_same_scores(found, expected)
    assert work(plan).calls == 1 and work(plan).tokens < 0.5 * sum(row.length for row in plan.rows)
    assert any(len(segment.ancestors) == 2 for segment in plan.packs[0])


@pytest.mark.ci
def test_scores_do_not_depend_on_how_much_is_read_at_a_time():
    model = build("mpt with alibi", platform.cpu())
    requests = choices(1, shots=30)
    expected = score_one_by_one(model.logits, requests)
    for tokens in (25, 60):  # less than the texts' tokens, and less than they have in all
        found, plan = scored(model, requests, max_batch_tokens=tokens)
        assert_same_scores(found, expected)
        assert work(plan).calls > 1


@pytest.mark.ci
def test_a_model_in_training_is_read_the_same_way(tmp_path):
    """A hybrid, its layers sharded over one rank: their contexts reach them through FSDP2's hooks."""
    config = tiny_config(tmp_path, tmp_path, {"model.max_seq_len": 300})
    with torch.device("meta"):
        model = CausalLM(HybridLM(config.model))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallelize(model, config.train, World(0, 1, 0, 1), torch.device("cpu"))
        model.hybrid.init_weights(1)
        requests = choices(2, shots=25)
        found, _ = scored(model, requests)
        assert_same_scores(found, score_one_by_one(model.logits, requests))
    finally:
        torch.distributed.destroy_process_group()


def test_windows_are_read_with_a_cache():
    model = build("a window and soft caps", platform.cpu(), layers="w a")
    assert "sliding window" in (model.hybrid.prefix_refusal() or "") and not HybridScorer(model, tokenizer()).packed
