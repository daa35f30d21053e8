"""lm-evaluation-harness's `hf` model, asked for the prompts of our tasks as text: it tokenises them itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from llmtrain.eval.documents import Document
from llmtrain.eval.lm_eval import LmEvalWriter
from llmtrain.eval.sections import LmEvalPrompting
from llmtrain.eval.task import Documents, Task, by_category


def load_peer(folder: str, max_length: int, dtype: str) -> Any:
    """Its model of a folder in Hugging Face format, on the GPU if there is one. Raises ImportError without lm_eval."""
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # a line for every context that it cuts
    made: Any = HFLM  # its type hides what it takes
    options: dict[str, Any] = {"dtype": dtype, "max_length": max_length, "batch_size": 1}
    return made(pretrained=folder, device="cuda" if torch.cuda.is_available() else "cpu", **options)


def instances(
    task: Task, documents: Documents, shots: int, limit: int | None = None
) -> tuple[list[Document], list[tuple[int, Any]]]:
    """The documents to be asked about, and (document's index, Instance) for each request, in the order of Task.requests.

    limit: the first so many documents only. Premises of PMI scores are left out.
    """
    from lm_eval.api.instance import Instance

    assert isinstance(task.style, LmEvalPrompting)
    own = documents.examples is None
    pools = by_category(documents.everything if documents.examples is None else documents.examples)
    some = documents.evaluated[:limit]
    asked = []
    for category, group in by_category(some).items():
        prompts = LmEvalWriter(task.style).prompts(group, pools.get(category, []), shots, own)
        asked += [
            (one.document.index, Instance("loglikelihood", {}, (one.context, one.continuation), 0))
            for one in prompts
            if not one.premise
        ]
    return some, asked


def ask(peer: Any, asked: Sequence[tuple[int, Any]]) -> list[tuple[float, bool]]:
    """(log-likelihood, greedy) of each request."""
    return peer.loglikelihood([instance for _, instance in asked], disable_tqdm=True)
