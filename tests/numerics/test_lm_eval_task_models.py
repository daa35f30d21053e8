"""lm-evaluation-harness's own task files on two random models: log-likelihoods, answers and scores beside its `hf` model."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.eval.prompts.requests import GenerateUntilRequest, Loglikelihood, LoglikelihoodRequest, Response
from llmtrain.eval.scoring.load import find_model, find_tokenizer, load_scorer
from tests.numerics.test_eval_against_lm_eval import evaluate, recorded
from tests.numerics.test_lm_eval_tasks import NO_EXAMPLES, compare_metrics, our_task, write_records
from tests.support.icl import byte_level
from tests.support.lm_eval_files import FILES
from tests.support.random_models import llama, save_random

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, of the development dependencies"
)

LIMIT, WINDOW, ANSWER = 4, 640, 8  # documents, tokens, tokens of an answer
NATS, NATS_OF_TEXTS = 2e-4, 1e-3

VOCAB = 640


def zamba2() -> Any:
    from transformers import Zamba2Config, Zamba2ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_attention_heads": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "num_mem_blocks": 2,
        "adapter_rank": 4,
        "use_mem_rope": True,
        "chunk_size": 16,
        "max_position_embeddings": WINDOW,
    }
    return Zamba2ForCausalLM(Zamba2Config(**sizes))


MODELS: dict[str, Callable[[], Any]] = {"llama": lambda: llama(VOCAB, WINDOW), "zamba2": zamba2}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory) -> Path:
    """A random model and a tokenizer that puts a BOS."""
    torch.manual_seed(1)
    return save_random(MODELS[request.param](), byte_level(bos=True), tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
@pytest.mark.parametrize("shots", [0, 1])
def test_models(folder, shots, tmp_path):
    from lm_eval.api.task import ConfigurableTask

    from tests.support import harness as oracle

    found = find_model(str(folder))
    assert found.native
    tokenizer = find_tokenizer(found)
    scorer = load_scorer(found, tokenizer, dtype="float32", max_length=WINDOW)
    lm = recorded(folder, WINDOW)
    theirs, ours = [], []
    for path in FILES:
        if shots and path in NO_EXAMPLES:
            continue
        config = oracle.shipped(path, write_records(path, tmp_path), tmp_path / "cache")
        short: dict[str, Any] = {}
        if config.get("output_type", "generate_until") == "generate_until":
            given = {"until": ["\n\n"]} | (config.get("generation_kwargs") or {}) | {"max_gen_toks": ANSWER}
            short["generation_kwargs"] = {key: value for key, value in given.items() if key != "max_new_tokens"}
        settings = config | {"task": path.replace("/", "-"), "num_fewshot": shots}
        theirs.append(ConfigurableTask(config=settings | short))
        ours.append(our_task(path, tmp_path, **short))
    results = evaluate(lm, theirs, LIMIT)
    for their, task in zip(theirs, ours, strict=True):
        documents = task.documents(LIMIT)
        requests = task.requests(documents, tokenizer, shots, max_seq_len=task.window(WINDOW) - 1)
        scores = [request for request in requests if isinstance(request, LoglikelihoodRequest)]
        answers: list[Response] = list(scorer.loglikelihood(scores, window=task.window(WINDOW) - 1))
        answers += scorer.generate_until([request for request in requests if isinstance(request, GenerateUntilRequest)])
        rolling = task.settings.output_type == "loglikelihood_rolling"
        for request, answer in zip(scores, answers, strict=False):
            assert isinstance(answer, Loglikelihood)
            likelihood, greedy = lm.scores[request.context, request.continuation]
            nats = NATS_OF_TEXTS if rolling else NATS
            assert answer.log_likelihood == pytest.approx(likelihood, rel=0, abs=nats), task.name
            assert answer.greedy == greedy, task.name
        metrics = task.metrics(documents, requests, answers)
        name = their.config.task
        compare_metrics(metrics.values, results["results"][name], rel=1e-4)
        first = [sample for sample in results["samples"][name] if sample["filter"] == task.settings.chains[0]]
        for sample, one in zip(sorted(first, key=lambda sample: sample["doc_id"]), metrics.per_document, strict=True):
            assert "text" not in one.details or [[one.details["text"]]] == sample["resps"], task.name
