"""lm-evaluation-harness with the stand-in for a model: its tasks, its tokenisation, its metrics; no network, no weights."""

import os
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import lm_eval.evaluator
import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks._yaml_loader import load_yaml

from tests.support.icl import generate, score

TASKS = Path(next(iter(lm_eval.tasks.__path__)))


_HFLM: Any = HFLM  # its type hides what it inherits


class Harness(_HFLM):
    """Harness `hf` model with the stand-in's responses. asked: (context, continuation) ids; generations: (ids, stops, length)."""

    def __init__(self, tokenizer: Any, max_length: int = 2048):
        self.tokenizer = tokenizer
        self.tokenizer.pad_token = self.tokenizer.eos_token
        self.backend = "causal"
        self.add_bos_token = None
        self.custom_prefix_token_id = None
        self.batch_size_per_gpu = 1
        self.truncation = False
        self.enable_thinking = None
        self.chat_template_args = {}
        self.answer = generate
        self._max_length = max_length
        self._rank, self._world_size = 0, 1
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.generations: list[tuple[tuple[int, ...], tuple[str, ...], int]] = []
        self.cache_hook = type("Hook", (), {"add_partial": lambda *_: None})()

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: Any = None) -> Any:
        results = []
        for *_, context, continuation in requests:
            self.asked.append((tuple(context), tuple(continuation)))
            results.append(score(context, continuation))
        return results

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        texts = []
        for request in requests:
            context, arguments = request.args
            options = normalize_gen_kwargs(arguments, 256)
            length = options.pop("max_gen_toks")
            until = handle_stop_sequences(options.pop("until"), eos=None)
            ids = tuple(self.tok_batch_encode([context], left_truncate_len=self.max_length - length)[0][0].tolist())
            self.generations.append((ids, tuple(until), length))
            texts.append(postprocess_generated_text(self.answer(ids), until, None))
        return texts


def shipped(path: str, splits: dict[str, Path], cache: Path, **changes: Any) -> dict[str, Any]:
    """The harness's own task, read from local files. splits: split -> JSONL."""
    return local(splits, cache, **(load_yaml(TASKS / path) | {"dataset_name": None} | changes))


def local(splits: dict[str, Path], cache: Path, **settings: Any) -> dict[str, Any]:
    files = {split: str(file) for split, file in splits.items()}
    return settings | {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files, "cache_dir": str(cache)},
        "task": "it",
    }


def evaluate(lm: Harness, config: dict[str, Any], shots: int, limit: int | None, **chat: Any) -> dict[str, Any]:
    """Harness results of one task. chat: the harness's settings of chat templates."""
    task = ConfigurableTask(config=config | {"num_fewshot": shots})
    task.set_fewshot_seed(1234)
    os.environ["DISABLE_MULTIPROC"] = "1"
    results = lm_eval.evaluator.evaluate(lm, {"it": task}, limit=limit, bootstrap_iters=10, **chat)
    assert results is not None
    return cast(dict[str, Any], cast(Any, results)["results"]["it"])
