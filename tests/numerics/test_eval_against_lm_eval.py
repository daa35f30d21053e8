"""Scores and answers beside lm-evaluation-harness's `hf` model: the same weights, the same tasks, number by number.

The requests' token ids are compared in test_eval_lm_eval; here, the models' responses.
"""

import importlib.util
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llmtrain.eval.native_task import NativeTask, load_task
from llmtrain.eval.prompts.requests import GenerateUntilRequest, Loglikelihood, LoglikelihoodRequest, Response
from llmtrain.eval.report.metrics import DocumentMetrics, Metrics
from llmtrain.eval.scoring.load import find_model, find_tokenizer, load_scorer
from tests.numerics.test_eval_lm_eval import LOCAL, NAMES, categories, harness_settings, without_pmi_premise
from tests.support.closeness import rounding
from tests.support.icl import byte_level, icl_file
from tests.support.random_models import llama, save_random

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, of the development dependencies"
)

LIMIT = 40  # documents
LOGITS = 10.0  # magnitude; a log-likelihood near 0 is a difference of two of them
HIDDEN = 32  # terms of a logit
WINDOW = 300
SIZES: dict[str, Any] = {"vocab_size": 600, "hidden_size": 32, "num_hidden_layers": 2}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=600, n_embd=32, n_layer=2, n_head=4, n_positions=WINDOW)
    return GPT2LMHeadModel(config)


def mamba2() -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes: dict[str, Any] = {
        "state_size": 8,
        "num_heads": 4,
        "head_dim": 16,
        "expand": 2,
        "n_groups": 1,
        "chunk_size": 32,
    }
    return Mamba2ForCausalLM(Mamba2Config(**SIZES, **sizes))


def mpt() -> Any:
    from transformers import MptConfig, MptForCausalLM

    return MptForCausalLM(MptConfig(vocab_size=600, d_model=32, n_layers=2, n_heads=4, max_seq_len=WINDOW))


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "llama": lambda: llama(600, WINDOW), "mamba2": mamba2, "mpt": mpt}


@pytest.fixture(
    scope="module",
    params=["llama", "mamba2", pytest.param("gpt2", marks=pytest.mark.ci), pytest.param("mpt", marks=pytest.mark.slow)],
)
def folder(request, tmp_path_factory) -> Path:
    torch.manual_seed(1)
    return save_random(MODELS[request.param](), byte_level(), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("harness")


def first_records(name: str, folder: Path) -> Path:
    """File of the first records of a task, of each category, so that both sides read less."""
    source = icl_file(LOCAL[name][0])
    made = folder / source.name
    if not made.exists():
        seen: Counter[str] = Counter()
        with source.open(encoding="utf-8") as lines, made.open("w", encoding="utf-8") as file:
            for line in lines:
                category = json.loads(line).get("category", "")
                seen[category] += 1
                if seen[category] <= 3 * LIMIT:
                    file.write(line)
    return made


def recorded(folder: Path, max_length: int) -> Any:
    """Harness `hf` model that records its log-likelihoods by token ids, and by those of a context how much its greedy answer
    preferred each token at least to the next best one."""
    from lm_eval.models.huggingface import HFLM

    base: Any = HFLM  # its type hides what it inherits

    class Recorded(base):
        scores: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, bool]]
        margins: dict[tuple[int, ...], float]

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **options: Any) -> Any:
            answers = super()._loglikelihood_tokens(requests, *args, **options)
            for (_, context, continuation), answer in zip(requests, answers, strict=True):
                self.scores[tuple(context), tuple(continuation)] = answer
            return answers

        def _model_generate(self, context: Any, *args: Any, attention_mask: Any, **options: Any) -> Any:
            options |= {"return_dict_in_generate": True, "output_logits": True}
            made = super()._model_generate(context, *args, attention_mask=attention_mask, **options)
            best, second = torch.stack(made.logits, 1).topk(2).values.unbind(-1)  # [batch, steps]
            for row, mask, margin in zip(context, attention_mask, best - second, strict=True):
                self.margins[tuple(row[mask.bool()].tolist())] = float(margin.min())
            return made.sequences

    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_length": max_length}
    made: Any = Recorded(pretrained=str(folder), batch_size=4, **options)
    made.scores, made.margins = {}, {}
    return made


def their_tasks(name: str, shots: int, folder: Path) -> list[Any]:
    """Harness tasks, one per category, in alphabetical order."""
    source = first_records(name, folder)
    files = categories(source, folder) if load_task(name, "lm-eval").config.category else [source]
    return [their_task(name, file, f"{name}-{i}", shots, folder / "cache") for i, file in enumerate(files)]


def their_task(name: str, file: Path, title: str, shots: int, cache: Path) -> Any:
    from lm_eval.api.task import ConfigurableTask

    from tests.support import harness as oracle

    settings = LOCAL[name][1]
    rest = harness_settings(name)
    if "yaml" in settings:
        splits = {"training_split": None, "validation_split": None, "test_split": "test"}
        config = oracle.shipped(settings["yaml"], {"test": file}, cache, **splits, **rest)
    else:
        config = oracle.local({"test": file}, cache, test_split="test", **rest)
    return ConfigurableTask(config=config | {"task": title, "num_fewshot": shots})


def our_task(name: str, folder: Path) -> NativeTask:
    source = first_records(name, folder)
    task = without_pmi_premise(load_task(name, "lm-eval", source.parent))
    return NativeTask(task.config, "lm-eval", task.source.model_copy(update={"path": source.name}), task.base)


def evaluate(lm: Any, tasks: list[Any], limit: int) -> Any:
    import lm_eval.evaluator
    from lm_eval.tasks import TaskManager

    os.environ["DISABLE_MULTIPROC"] = "1"
    none: Any = TaskManager(include_defaults=False)  # its own tasks are thousands of files, and not asked for
    options: dict[str, Any] = {"task_manager": none, "bootstrap_iters": 0, "log_samples": True}
    with patch.object(lm_eval.evaluator, "add_env_info"):  # asks pip for seconds what is installed
        return lm_eval.evaluator.simple_evaluate(model=lm, tasks=tasks, limit=limit, **options)


def compare(folder: Path, names: list[str], shots: int, window: int, scratch: Path, limit: int = LIMIT) -> None:
    found = find_model(str(folder))
    assert found.native == (folder.name[:4] != "gpt2")
    tokenizer = find_tokenizer(found)
    scorer = load_scorer(found, tokenizer, dtype="float32", max_length=window)
    lm = recorded(folder, window)
    tasks = {name: their_tasks(name, shots, scratch) for name in names}
    results = evaluate(lm, [task for some in tasks.values() for task in some], limit)
    for name in names:
        task = our_task(name, scratch)
        documents = task.documents(limit)
        requests = task.requests(documents, tokenizer, shots)
        scores = [request for request in requests if isinstance(request, LoglikelihoodRequest)]
        answers: list[Response] = list(scorer.loglikelihood(scores, window=task.window(window) - 1))
        answers += scorer.generate_until([request for request in requests if isinstance(request, GenerateUntilRequest)])
        for request, answer in zip(scores, answers, strict=False):
            assert isinstance(answer, Loglikelihood)
            likelihood, greedy = lm.scores[request.context, request.continuation]
            # Terms of one sign, so that their magnitudes sum to that of the sum.
            rounded = rounding(max(abs(likelihood), LOGITS), len(request.continuation))
            assert answer.log_likelihood == pytest.approx(likelihood, rel=0, abs=rounded), (name, request)
            assert answer.greedy == greedy, (name, request)
        undecided = {one.document for one in requests if isinstance(one, GenerateUntilRequest) and is_tie(lm, one)}
        assert len(undecided) <= 0.25 * len(documents)
        metrics = task.metrics(documents, requests, answers)
        titles = [theirs.config.task for theirs in tasks[name]]
        if len(titles) == 1:
            compare_metrics(metrics, results["results"][titles[0]])
        compare_documents(metrics.per_document, [results["samples"][title] for title in titles], undecided)


def is_tie(lm: Any, request: GenerateUntilRequest) -> bool:
    """True if a rounding may change a greedy answer of some hundred tokens."""
    [margin] = [margin for context, margin in lm.margins.items() if request.context[-len(context) :] == context]
    return margin < rounding(LOGITS, HIDDEN)


def compare_metrics(metrics: Metrics, theirs: dict[str, Any]) -> None:
    compared = [name for name in metrics.values if NAMES.get(name) in theirs]
    assert compared
    for name in compared:
        assert math.isclose(metrics.values[name].value, theirs[NAMES[name]], rel_tol=1e-4), name


def compare_documents(
    per_document: Sequence[DocumentMetrics], groups: Sequence[Sequence[dict[str, Any]]], undecided: Collection[int] = ()
) -> None:
    """Hits and texts, document by document. groups: the harness's samples, of each category, with one for each filter.
    undecided: documents to leave out."""
    filters: dict[str, list[dict[str, Any]]] = {}
    for samples in groups:
        for sample in sorted(samples, key=lambda one: one["doc_id"]):
            filters.setdefault(sample["filter"], []).append(sample)
    compared = 0
    for number, one in enumerate(per_document):
        if one.document in undecided:
            continue
        for metric, (value, _) in one.values.items():
            key, _, name = NAMES.get(metric, "").partition(",")
            if name in filters and key in filters[name][number] and key != "perplexity":
                compared += 1
                assert value == float(filters[name][number][key]), (one.details["where"], metric)
        if "text" in one.details:
            [[text]] = next(iter(filters.values()))[number]["resps"]
            assert one.details["text"] == text, one.details["where"]
    assert compared >= len(per_document) - len(undecided) > 0


SCORED = [name for name in LOCAL if name not in ("triviaqa", "gsm8k")]


def test_zero_shot(folder, scratch):
    compare(folder, SCORED, 0, WINDOW, scratch)


@pytest.mark.ci
def test_few_shot_and_a_window_that_cuts_contexts(folder, scratch):
    compare(folder, ["arc_challenge", "boolq", "winogrande", "lambada"], 2, 90, scratch)
    compare(folder, ["copa", "winograd", "openbook_qa", "piqa"], 3, WINDOW, scratch)


def test_answers_in_text(folder, scratch):
    compare(folder, ["triviaqa"], 0, WINDOW, scratch, limit=10)


@pytest.mark.ci
def test_long_answers_in_text(folder, scratch):
    compare(folder, ["gsm8k"], 1, 600 if folder.name[:5] in ("mamba", "llama") else WINDOW, scratch, limit=5)
