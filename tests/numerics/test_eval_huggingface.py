"""Scorer of transformers' models, and generation by both scorers, against one request at a time."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness.plan_work import work
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.convert.lazy_checkpoint import LazyTensor
from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.errors import UserError
from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.requests import GeneratedText, GenerateUntilRequest
from llmtrain.eval.scoring.huggingface import HuggingFaceScorer
from llmtrain.eval.scoring.load import find_model, find_tokenizer, load_scorer, window_of
from llmtrain.eval.scoring.scorer import HybridScorer
from llmtrain.kernels import platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from tests.support import checkpoints
from tests.support.models import VOCAB, build
from tests.support.scoring import KINDS, Text, assert_same_scores, score_one_by_one

EOD = 0


def gpt2(**settings: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=EOD, eos_token_id=EOD, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return model


def logits_of(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda ids: model(ids, use_cache=False).logits


def mistral(**settings: Any) -> Any:
    """Grouped queries; a window may be shorter than the texts."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = MistralForCausalLM(MistralConfig(**sizes, **heads, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return model


PEERS = {
    "gpt2": gpt2,
    "grouped queries": lambda: mistral(sliding_window=None),
    "a window": lambda: mistral(sliding_window=17),
}


@pytest.mark.parametrize("share", [True, False], ids=["shared", "whole"])
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_a_forward_pass_per_request(kind, peer, share):
    model, requests = PEERS[peer](), KINDS[kind]()
    expected = score_one_by_one(logits_of(model), requests)
    made = HuggingFaceScorer(model, checkpoints.tokenizer(), share=share)
    assert made.window == 128 and made.logits_to_keep and made.share == share
    made.limits = replace(made.limits, call_cost=4)  # of a small model, every token counts
    assert_same_scores(made.loglikelihood(requests), expected)
    read, whole = work(made.plan).tokens, sum(row.length for row in made.plan.rows)
    assert read == whole if not share or kind == "texts" else read < 0.9 * whole
    few = HuggingFaceScorer(model, checkpoints.tokenizer(), max_batch_tokens=50, share=share)
    assert_same_scores(few.loglikelihood(requests), expected)
    cut = HuggingFaceScorer(model, checkpoints.tokenizer(), max_length=20, share=share)
    short = [request for request in requests if len(request.continuation) <= 20]
    assert_same_scores(cut.loglikelihood(short), score_one_by_one(logits_of(model), short, 20))


def test_logits_are_few_at_a_time(monkeypatch):
    monkeypatch.setattr("llmtrain.eval.scoring.huggingface._LOGITS", 40 * VOCAB)
    model, requests = gpt2(), KINDS["all"]()
    shown = []
    model.register_forward_hook(lambda module, given, out: shown.append(out.logits.shape[:2].numel()))
    expected = score_one_by_one(logits_of(model), requests)
    for keeps in (True, False):  # False: as of a model that gives logits for every token
        made = HuggingFaceScorer(model, checkpoints.tokenizer(), share=keeps)
        made.logits_to_keep = keeps
        shown.clear()
        assert_same_scores(made.loglikelihood(requests), expected)
        longest = max(row.length for row in made.plan.rows)
        assert max(shown) <= max(40, longest)  # one row at least


def test_a_model_of_states_is_read_whole():
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(2)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 16,
        "expand": 2,
    }
    model: Any = Mamba2ForCausalLM(Mamba2Config(**sizes, num_heads=4, head_dim=16, n_groups=1, chunk_size=16)).eval()
    requests = KINDS["all"]()
    made = HuggingFaceScorer(model, checkpoints.tokenizer(), max_length=128)
    assert not made.share
    assert_same_scores(made.loglikelihood(requests), score_one_by_one(logits_of(model), requests))


def greedy_one_by_one(
    forward: Callable[[Tensor], Tensor], tokenizer: TextTokenizer, request: GenerateUntilRequest, window: int
) -> GeneratedText:
    """Greedy decoding without a cache that decodes the whole text for every token."""
    context = list(request.context[-(window - request.max_new_tokens) :])
    new: list[int] = []
    for _ in range(request.max_new_tokens):
        with torch.no_grad():
            token = int(forward(torch.tensor([context + new]))[0, -1].argmax())
        if token == tokenizer.eod_id:
            break
        new.append(token)
        text = tokenizer.decode(new)
        if any(stop in text for stop in request.stops):
            break
    text = tokenizer.decode(new)
    next_tokens = [text.find(stop) for stop in request.stops if stop in text]
    return GeneratedText(text[: min(next_tokens)] if next_tokens else text, len(request.context) - len(context))


def generations(tokenizer: TextTokenizer, forward: Callable[[Tensor], Tensor]) -> list[GenerateUntilRequest]:
    """Requests, some with a stop text that occurs in the answer."""
    text = Text(11, VOCAB)
    made = [GenerateUntilRequest(i, text(2, 40), (), 5 + 7 * (i % 2)) for i in range(8)]
    for i, request in enumerate(list(made)):
        whole = greedy_one_by_one(forward, tokenizer, request, 60).text
        if len(whole) > 4:
            made.append(GenerateUntilRequest(8 + i, request.context, (whole[2:4], "\x00"), request.max_new_tokens))
    return made


@pytest.mark.parametrize("name", ["gpt2", "llama with grouped queries", "zamba2 as the 1.2B", "mpt with alibi"])
def test_generated_text_is_that_of_one_token_after_another(name):
    tokenizer = checkpoints.tokenizer()  # its first 97 tokens are a document's end and single characters
    if name == "gpt2":
        peer = gpt2()
        forward, made = logits_of(peer), HuggingFaceScorer(peer, tokenizer, max_length=60)
    else:
        model = build(name, platform.cpu())
        forward, made = model.logits, HybridScorer(model, tokenizer, max_length=60)
    requests = generations(tokenizer, forward)
    assert len(requests) > 10
    found = made.generate_until(requests)
    assert found == [greedy_one_by_one(forward, tokenizer, request, 60) for request in requests]
    with pytest.raises(EvalError, match="60 new tokens leave no room for a context in the model's window of 60"):
        made.generate_until([GenerateUntilRequest(0, (1,), (), 60)])
    with pytest.raises(EvalError, match="an empty context cannot be continued"):
        made.generate_until([GenerateUntilRequest(0, (), (), 6)])


@pytest.fixture
def folder(tmp_path) -> Path:
    tokenizer = checkpoints.tokenizer()
    gpt2().save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    return tmp_path


def test_a_folder_of_another_family_is_read_by_transformers(folder, tmp_path):
    found = find_model(str(folder))
    assert not found.native and window_of(found) == 128
    with pytest.raises(EvalError, match=r"model_type 'gpt2'.*use backend: transformers"):
        find_model(str(folder), "llmtrain")
    with pytest.raises(UserError, match="the tokenizer has 270 tokens, the model 97"):
        load_scorer(found, find_tokenizer(found))
    with pytest.raises(EvalError, match="by its config it reads 128 tokens; max_length is 129"):
        load_scorer(found, find_tokenizer(found), max_length=129)


def test_a_folder_of_one_of_our_families_by_either(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=270, **sizes, max_position_embeddings=64, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    checkpoints.tokenizer().save(tmp_path)
    requests = KINDS["choices"]()
    found = [find_model(str(tmp_path), backend) for backend in ("auto", "transformers")]
    assert [one.native for one in found] == [True, False]
    assert [window_of(one) for one in found] == [64, 64]
    ours, theirs = (load_scorer(one, find_tokenizer(one)) for one in found)
    assert isinstance(ours, HybridScorer) and isinstance(theirs, HuggingFaceScorer)
    assert_same_scores(ours.loglikelihood(requests), theirs.loglikelihood(requests))


def test_learned_positions_end_where_they_end(tmp_path):
    step = tmp_path / "run" / "checkpoints" / "step-00000001"
    step.parent.mkdir(parents=True)
    plain = {"type": "attention", "n_heads": 2, "mlp": {"type": "gelu", "d_ff": 32}}
    changes = {"positions": "learned", "max_seq_len": 64, "blocks": {"attn": plain}}
    config = ModelConfig.model_validate(checkpoints.mpt(16, 1, 270).model_dump() | changes)
    model = HybridLM(config)
    model.init_weights(0)
    tensors = [LazyTensor(name, p.shape, lambda p=p: p.detach()) for name, p in model.named_parameters()]
    checkpoints.write_tensors(step, config, tensors)
    found = find_model(str(tmp_path / "run"))
    with pytest.raises(EvalError, match="learned positions for 64 tokens; max_length is 65"):
        load_scorer(found, find_tokenizer(found), max_length=65)


def test_a_checkpoint_is_not_for_transformers(tmp_path):
    step = tmp_path / "run" / "checkpoints" / "step-00000001"
    step.parent.mkdir(parents=True)
    checkpoints.save(step, checkpoints.mpt(16, 1, 270))
    found = find_model(str(tmp_path / "run"))
    assert found.folder == step and found.native and window_of(found) == 2048
    with pytest.raises(EvalError, match="which transformers cannot read; `llmtrain export` it"):
        find_model(str(tmp_path / "run"), "transformers")
    shutil.rmtree(step / "tokenizer")
    content = manifests.read(step)
    checkpoints.edit_manifest(
        step,
        config={name: part for name, part in content.config.items() if name != "data"},
        files={name: file for name, file in content.files.items() if not name.startswith("tokenizer/")},
    )
    with pytest.raises(EvalError, match="was imported without a tokenizer"):
        find_tokenizer(found)
    assert find_model(str(step)).identity != found.identity
