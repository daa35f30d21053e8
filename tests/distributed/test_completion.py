"""Training on answers beside a plain formula: sums over trained tokens of whole conversations, divided by their number."""

from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.data.loader.loaders import build_train_loader, build_validation_loader
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config
from llmtrain.schema.schedule import resolve
from llmtrain.train.optim import build_optimizer
from llmtrain.train.report.loggers import read_metrics
from tests.support.chats import prepare_chats
from tests.support.runs import train
from tests.support.tiny import GLOBAL_BATCH, tiny_config

SEQ_LEN, STEPS = 64, 10


def config_of(shards: Path, run_dir: Path, **changes: Any) -> Config:
    settings = {
        "objective": {"type": "completion"},
        "data.seq_len": SEQ_LEN,
        "model.max_seq_len": SEQ_LEN,
        "model.vocab_size": 304,
        "data.mask_documents": True,
        "data.num_canonical_nodes": 1,
        "train.duration": f"{STEPS} steps",
        "train.clip_grad_norm": None,
        "eval": {"interval": f"{STEPS} steps"},
    }
    return tiny_config(shards, run_dir, settings | changes)


@pytest.fixture(scope="module", params=["best_fit", pytest.param("padded", marks=pytest.mark.ci)])
def shards(request, tmp_path_factory) -> Path:
    return prepare_chats(tmp_path_factory.mktemp("chats"), request.param)


def nll_of_conversations(lm: CausalLM, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Sum over the trained tokens of each document alone, without any other in its sequence, and their number."""
    total, count = torch.zeros(()), 0
    for ids, labels, documents in zip(batch["input_ids"], batch["labels"], batch["document_ids"], strict=True):
        for number in documents.unique().tolist():
            here = documents == number
            trained = labels[here]
            if (trained < 0).all():
                continue
            logits = lm(ids[here][None], lm.context(ids[here][None]), lambda hidden, head: hidden @ head.T)[0]
            chosen = logits.log_softmax(-1)[trained >= 0].gather(1, trained[trained >= 0, None])
            total, count = total - chosen.sum(), count + len(chosen)
    return total, count


@pytest.fixture(scope="module")
def plain(shards, tmp_path_factory) -> dict[str, Any]:
    """Losses of each step, the number of its trained tokens, and the validation loss after the last, by the formula."""
    config = config_of(shards, tmp_path_factory.mktemp("plain"))
    model = HybridLM(config.model, documents=False)
    model.init_weights(config.seed)
    lm, optimizer = CausalLM(model, config.train.loss), build_optimizer(model, config.optimizer)
    loader = build_train_loader(config.data, global_batch_size=GLOBAL_BATCH, trained_only=True)
    schedule = resolve(config, len(loader))
    losses, counts, batches = [], [], (batch for _ in range(STEPS) for batch in loader)
    for step, batch in zip(range(STEPS), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.zero_grad()
        total, count = nll_of_conversations(lm, dict(batch))
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
        counts.append(count)
    held = build_validation_loader(config.data, global_batch_size=GLOBAL_BATCH, trained_only=True)
    assert held is not None
    with torch.no_grad():
        sums = [nll_of_conversations(lm, dict(batch)) for batch in held]
    validation = sum(total.item() for total, _ in sums) / sum(count for _, count in sums)
    assert max(counts) > 1.1 * min(counts)
    return {"losses": losses, "counts": counts, "validation": validation}


FURTHER = [(1, 8, {}), (1, 1, {}), (2, 4, {}), (2, 4, {"tensor": 2}), (2, 4, {"context": 2})]


@pytest.mark.parametrize(
    "size, microbatch, parallel", [(2, 1, {}), *(pytest.param(*one, marks=pytest.mark.ci) for one in FURTHER)]
)
def test_steps_are_those_of_the_formula(ranks, shards, plain, tmp_path, size, microbatch, parallel):
    changes = {"train.microbatch_size": microbatch, "train.parallel": parallel}
    run = ranks(size).run(train, config_of(shards, tmp_path / "run", **changes))[0]
    assert list(run.losses.values()) == pytest.approx(plain["losses"], rel=1e-5, abs=0)
    assert run.validation[STEPS] == pytest.approx(plain["validation"], rel=1e-5)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert list(read_metrics(metrics, "tokens/trained")[1]) == plain["counts"]
    assert not list(read_metrics(metrics, "metrics/validation/bits_per_byte")[1])
