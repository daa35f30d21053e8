"""Texts that begin with BOS as written: one BOS, as in lm-evaluation-harness, whatever the kind of request and tokenizer."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.tokenize.tokenizer import EOD
from llmtrain.eval.native_task import load_task
from llmtrain.eval.prompts.requests import GenerateUntilRequest, LoglikelihoodRequest
from tests.support.icl import TOKENIZERS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, of the development dependencies"
)

BEGINNINGS = ("", "<s>", "<s><s>", " <s>", "<s> ", "<", EOD, f"{EOD}<s>", "</s>", "so <s>")


def ours(folder: Path, kind: str, record: dict[str, Any], tokenizer: Any, **section: Any) -> Any:
    (folder / "x.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    task = {"name": "it", "type": kind, "source": {"path": "x.jsonl"}, "lm_eval": section}
    (folder / "it.yaml").write_text(json.dumps(task), encoding="utf-8")
    made = load_task(folder / "it.yaml", "lm-eval")
    [request] = made.requests(made.documents(), tokenizer, 0, max_seq_len=64)
    return request


@pytest.mark.parametrize("name", TOKENIZERS)
def test_requests_are_those_of_the_harness(name: str, tmp_path):
    from lm_eval.api.instance import Instance
    from transformers import AutoTokenizer

    from tests.support.harness import Harness

    tokenizer = TOKENIZERS[name]()
    tokenizer.save(tmp_path / "tokenizer")
    theirs = Harness(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), 64)
    several = 0
    for beginning in BEGINNINGS:
        context, continuation = f"{beginning}Is it", f" so{beginning}"
        request = ours(
            tmp_path, "language_modeling", {"context": context, "continuation": continuation}, tokenizer,
            continuation="{{continuation}}",
        )  # fmt: skip
        assert isinstance(request, LoglikelihoodRequest)
        theirs.loglikelihood([Instance("loglikelihood", {}, (context, continuation), 0)], disable_tqdm=True)
        assert (request.context, request.continuation) == theirs.asked[-1], (name, beginning)

        request = ours(tmp_path, "generation", {"context": context, "answer": "so"}, tokenizer, max_new_tokens=8)
        assert isinstance(request, GenerateUntilRequest)
        theirs.generate_until([Instance("generate_until", {}, (context, {"until": ["."], "max_gen_toks": 8}), 0)])
        assert request.context == theirs.generations[-1][0], (name, beginning)

        request = ours(tmp_path, "perplexity", {"text": context}, tokenizer)
        assert request.continuation == tuple(theirs.tok_encode(context)), (name, beginning)
        assert request.context == (theirs.prefix_token_id,)
        bos = tokenizer.backend.token_to_id("<s>")
        several += bos is not None and request.continuation[:2] == (bos, bos)
    assert several <= 1, "two only where two are written"
