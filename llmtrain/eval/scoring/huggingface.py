"""Scorer for any causal language model of transformers.

A prefix that requests share is read once if the model's cache holds only keys and values; other models read whole rows, padded on
the right.
"""

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.eval.errors import EvalError
from llmtrain.eval.scoring.batching import Limits, Rows
from llmtrain.eval.scoring.generation import Answer, Contexts, Requests, decoding_batches
from llmtrain.eval.scoring.prefix_plan import Plan, Subtree, Suffix, make_plan
from llmtrain.eval.scoring.scorer import RowScore, Scorer, cache_bytes
from llmtrain.generate.sampling import Sampler
from llmtrain.models.hf.foreign_files import reason
from llmtrain.models.loss import IGNORE

_LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
_LOGITS = 2**29
"""Most elements of the logits of one batch."""


class HuggingFaceScorer(Scorer):
    """Scorer by a model of transformers.

    max_batch_tokens: tokens per forward pass, padding included; default 16,384 on a GPU and 4,096 on a CPU. share: False reads
    every request whole.
    Raises EvalError when neither the model's config nor `max_length` gives the longest input.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: TextTokenizer,
        *,
        max_length: int | None = None,
        max_batch_tokens: int | None = None,
        share: bool = True,
        end_ids: Collection[int] = (),
    ):
        super().__init__(tokenizer, max_length or _longest(model.config), end_ids)
        self.model = model
        self.device = next(model.parameters()).device
        self.vocab_size = model.config.get_text_config().vocab_size
        self.logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        token_bytes = self._token_bytes() if share and self.logits_to_keep else None
        self.share = token_bytes is not None
        tokens, call_cost = (16_384, 1024) if self.device.type == "cuda" else (4096, 128)
        self.limits = Limits(max_batch_tokens or tokens, call_cost, 0, token_bytes or 0, cache_bytes(self.device))
        self.plan = Plan([])
        """Plan of the last call of `loglikelihood`."""

    def _score_rows(self, rows: Rows, host_work: Callable[[], bool]) -> Iterator[RowScore]:
        # No padding on the left: not every model can mask it.
        self.plan = make_plan(rows, self.limits, window=self.window, share=self.share, left_padding=False)
        for subtree in self.plan.subtrees:
            yield from self._score_subtree(subtree)

    def _token_bytes(self) -> int | None:
        """Memory of a token in the cache; None for a cache that holds more than keys and values per token."""
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        with torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
            cache = getattr(self.model(ids, use_cache=True, logits_to_keep=1), "past_key_values", None)
        layers: list[Any] = cache.layers if type(cache) is DynamicCache else []
        if not layers or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
            return None
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) // ids.shape[1]

    def _score_subtree(self, subtree: Subtree) -> Iterator[RowScore]:
        root = self._extend(None, [subtree.root]) if subtree.root else None
        for batch in subtree.batches:
            cache = root
            if batch.prefixes:
                copies = None if root is None else _select_rows(root, [0] * len(batch.prefixes))
                cache = self._extend(copies, batch.prefixes)
            for suffix_batch in batch.suffix_batches:
                yield from self._score_suffixes(suffix_batch, cache)

    def _extend(self, cache: Any, prefixes: Sequence[Sequence[int]]) -> Any:
        """Cache after reading prefixes of one length behind what `cache` holds."""
        ids = torch.tensor(prefixes, device=self.device)
        return self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    def _score_suffixes(self, suffix_batch: Sequence[Suffix], before: Any) -> Iterator[RowScore]:
        starts = [len(suffix.tokens) - self.plan.rows[suffix.row].scored for suffix in suffix_batch]
        width = max(len(suffix.tokens) for suffix in suffix_batch)
        keep = width - min(starts)
        most = max(_LOGITS // (self.vocab_size * (keep if self.logits_to_keep else width)), 1)
        for at in range(0, len(suffix_batch), most):
            some = slice(at, at + most)
            yield from self._read(suffix_batch[some], starts[some], width, keep, before)

    def _read(
        self, suffixes: Sequence[Suffix], starts: Sequence[int], width: int, keep: int, before: Any
    ) -> Iterator[RowScore]:
        ids = torch.zeros(len(suffixes), width, dtype=torch.int64)
        labels = torch.full((len(suffixes), width), IGNORE)
        for i, (suffix, start) in enumerate(zip(suffixes, starts, strict=True)):
            row = self.plan.rows[suffix.row]
            ids[i, : len(suffix.tokens)] = torch.tensor(suffix.tokens)
            labels[i, start : len(suffix.tokens)] = torch.tensor(row.tokens[-row.scored :])
        # No attention mask: padding comes after all scored tokens, and attention is causal.
        options: dict[str, Any] = {"logits_to_keep": keep} if self.logits_to_keep else {}
        if before is None:
            options["use_cache"] = False
        else:
            options |= {
                "use_cache": True,
                "past_key_values": _select_rows(before, [suffix.parent for suffix in suffixes]),
            }
        logits = self.model(ids.to(self.device), **options).logits[:, -keep:]
        labels = labels[:, -keep:].to(self.device)
        scored = labels != IGNORE
        picked, wanted = logits[scored].float(), labels[scored]
        scores = torch.zeros(labels.shape, dtype=torch.float64, device=self.device)
        greedy = torch.ones_like(scored)
        scores[scored] = (picked.gather(-1, wanted[:, None])[:, 0] - picked.logsumexp(dim=-1)).double()
        greedy[scored] = picked.argmax(dim=-1) == wanted
        numbers = (suffix.row for suffix in suffixes)
        yield from zip(numbers, zip(scores.sum(1).tolist(), greedy.all(1).tolist(), strict=True), strict=True)

    def _decoding_batches(self, requests: Requests, contexts: Contexts) -> Iterator[list[int]]:
        """Each batch has contexts of one length, and so no padding."""
        return decoding_batches(requests, contexts, lambda read, new: self.limits.rows(read + new, 0), call_cost=0)

    def _decode(self, contexts: Contexts, answers: Sequence[Answer], requests: Requests) -> None:
        ids = torch.tensor(contexts, device=self.device)

        def ended(seen: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            tokens = seen[:, -1].tolist()
            next_tokens = [answer.add(token) for answer, token in zip(answers, tokens, strict=True)]
            return torch.tensor(next_tokens, device=self.device)

        with torch.no_grad():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                max_new_tokens=requests[0].max_new_tokens,
                pad_token_id=self.tokenizer.eod_id,
                logits_processor=self._draws(contexts, requests),
                stopping_criteria=[ended],
            )

    def _draws(self, contexts: Contexts, requests: Requests) -> list[Callable[[Tensor, Tensor], Tensor]]:
        """Processors of transformers after which only the drawn token is left; none for greedy answers."""
        options, read = requests[0].sampling, len(contexts[0])
        if options is None:
            return []
        numbers, draws = [request.row_number for request in requests], requests[0].max_new_tokens
        sampler = Sampler(options, contexts, numbers, vocab_size=self.vocab_size, draws=draws, device=self.device)

        def draw(seen: Tensor, logits: Tensor) -> Tensor:
            tokens = sampler(logits, seen.shape[1] - read)
            return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)

        return [draw]


def _select_rows(cache: Any, rows: Sequence[int]) -> Any:
    """New cache with copies of some rows of another."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in made.layers:
        for name, value in list(vars(layer).items()):
            if isinstance(value, Tensor):
                setattr(layer, name, value[torch.tensor(rows)] if name in ("keys", "values") else value.clone())
    return made


def load_huggingface(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """AutoModelForCausalLM of a folder. Raises EvalError with the reason when transformers cannot load one.

    Nothing that the folder holds or names is run: no Python file, no pickled code, no kernel of the hub.
    """
    from transformers import AutoModelForCausalLM

    config = _config(folder)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, trust_remote_code=False, weights_only=True
        )
    except Exception as error:  # transformers raises whatever its many formats do
        raise EvalError(
            f"{folder}: transformers cannot load a causal language model from it: {reason(error)}"
        ) from error
    return model.to(device).eval()


def window_of_config(folder: Path) -> int:
    """Longest input by config.json or its class's default. Raises EvalError when neither gives one."""
    return _longest(_config(folder))


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its many formats do
        raise EvalError(f"{folder}: transformers cannot read its config.json: {reason(error)}") from error
    named = str(getattr(config, "_attn_implementation", None))
    if "/" in named:
        raise EvalError(f"{folder}: its config.json asks for the code of {named} on the hub, which is not run here")
    return config


def _longest(config: Any) -> int:
    text = config.get_text_config()
    for name in _LENGTHS:
        length = getattr(text, name, None)
        if isinstance(length, int) and 0 < length < 2**30:
            return length
    raise EvalError(f"the config of this {config.model_type} model does not say how long a text may be; set max_length")
