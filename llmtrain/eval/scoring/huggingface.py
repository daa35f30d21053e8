"""Any causal language model of transformers. What requests begin with alike is read once where the model's cache holds keys and
values alone; of other models whole rows, padded on the right."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.data.tokenizer import TextTokenizer
from llmtrain.eval.errors import EvalError
from llmtrain.eval.scoring.batching import Limits, pack, rows_of
from llmtrain.eval.scoring.generation import Answer, cut_context
from llmtrain.eval.scoring.overlap import idle
from llmtrain.eval.scoring.prefix_plan import Family, Plan, Tail, make_plan
from llmtrain.eval.scoring.request import Generate, Generated, Score, Scored
from llmtrain.eval.scoring.scorer import cache_bytes
from llmtrain.models.loss import IGNORE

_LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
_LOGITS = 2**29
"""Elements of the logits of one batch, for models that give them for every token."""


class HuggingFaceScorer:
    """max_batch_tokens: read at a time, padding included; default 16,384 on a GPU and 4,096 on a CPU. share: False reads every
    request whole.

    end_ids: tokens beside the tokenizer's end-of-document one that end an answer.
    Raises EvalError when the model's config does not say how long a text may be and `max_length` does not either.
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
        self.model, self.tokenizer, self.end_ids = model, tokenizer, end_ids
        self.window = max_length or _longest(model.config)
        self.device = next(model.parameters()).device
        self.vocab_size = model.config.get_text_config().vocab_size
        self.keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        token_bytes = self._token_bytes() if share and self.keeps else None
        self.share = token_bytes is not None
        tokens, patience = (16_384, 1024) if self.device.type == "cuda" else (4096, 128)
        self.limits = Limits(max_batch_tokens or tokens, patience, 0, token_bytes or 0, cache_bytes(self.device))
        self.plan = Plan([])
        """Of the last call of `score`."""

    def score(
        self,
        requests: Sequence[Score],
        progress: Callable[[int], None] = lambda done: None,
        *,
        window: int | None = None,
        meanwhile: Callable[[], bool] = idle,
    ) -> list[Scored]:
        rows = rows_of(requests, min(window or self.window, self.window))
        users = [0] * len(rows.rows)
        for place in rows.place:
            users[place] += 1
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows.rows)
        # Not padded on the left: not every model can tell that from text.
        self.plan = make_plan(rows, self.limits, window=self.window, share=self.share, padded=False)
        with torch.no_grad():
            for family in self.plan.families:
                for row, score in self._read_family(family):
                    found[row] = score
                    progress(users[row])
        return [
            Scored(*found[place], tokens=rows.rows[place].scored, truncated=truncated)
            for place, truncated in zip(rows.place, rows.truncated, strict=True)
        ]

    def _token_bytes(self) -> int | None:
        """That a token takes in the cache; None for a cache that does not only hold keys and values, token by token."""
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        with torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
            cache = getattr(self.model(ids, use_cache=True, logits_to_keep=1), "past_key_values", None)
        layers: list[Any] = cache.layers if type(cache) is DynamicCache else []
        if not layers or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
            return None
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) // ids.shape[1]

    def _read_family(self, family: Family) -> Iterator[tuple[int, tuple[float, bool]]]:
        trunk = self._filled(None, [family.trunk]) if family.trunk else None
        for batch in family.batches:
            cache = trunk
            if batch.prefixes:
                copies = None if trunk is None else _taken(trunk, [0] * len(batch.prefixes))
                cache = self._filled(copies, batch.prefixes)
            for piece in batch.pieces:
                yield from self._read_piece(piece, cache)

    def _filled(self, cache: Any, prefixes: Sequence[Sequence[int]]) -> Any:
        """prefixes: of one length."""
        ids = torch.tensor(prefixes, device=self.device)
        return self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    def _read_piece(self, piece: Sequence[Tail], before: Any) -> Iterator[tuple[int, tuple[float, bool]]]:
        starts = [len(tail.tokens) - self.plan.rows[tail.row].scored for tail in piece]
        width = max(len(tail.tokens) for tail in piece)
        keep = width - min(starts)
        most = max(_LOGITS // (self.vocab_size * (keep if self.keeps else width)), 1)
        for at in range(0, len(piece), most):
            some = slice(at, at + most)
            yield from self._read(piece[some], starts[some], width, keep, before)

    def _read(
        self, tails: Sequence[Tail], starts: Sequence[int], width: int, keep: int, before: Any
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        ids = torch.zeros(len(tails), width, dtype=torch.int64)
        labels = torch.full((len(tails), width), IGNORE)
        for i, (tail, start) in enumerate(zip(tails, starts, strict=True)):
            row = self.plan.rows[tail.row]
            ids[i, : len(tail.tokens)] = torch.tensor(tail.tokens)
            labels[i, start : len(tail.tokens)] = torch.tensor(row.tokens[-row.scored :])
        # No attention mask: what is padded comes after all that is scored, and causal models do not look ahead.
        options: dict[str, Any] = {"logits_to_keep": keep} if self.keeps else {}
        if before is None:
            options["use_cache"] = False
        else:
            options |= {"use_cache": True, "past_key_values": _taken(before, [tail.parent for tail in tails])}
        logits = self.model(ids.to(self.device), **options).logits[:, -keep:]
        labels = labels[:, -keep:].to(self.device)
        scored = labels != IGNORE
        picked, wanted = logits[scored].float(), labels[scored]
        scores = torch.zeros(labels.shape, dtype=torch.float64, device=self.device)
        greedy = torch.ones_like(scored)
        scores[scored] = (picked.gather(-1, wanted[:, None])[:, 0] - picked.logsumexp(dim=-1)).double()
        greedy[scored] = picked.argmax(dim=-1) == wanted
        numbers = (tail.row for tail in tails)
        yield from zip(numbers, zip(scores.sum(1).tolist(), greedy.all(1).tolist(), strict=True), strict=True)

    def generate(
        self, requests: Sequence[Generate], progress: Callable[[int], None] = lambda done: None
    ) -> list[Generated]:
        """Contexts of one length at a time: without padding, no model can take it for text."""
        contexts = [cut_context(request, self.window) for request in requests]
        found: dict[int, Generated] = {}
        order = sorted(range(len(requests)), key=lambda i: (len(contexts[i]), requests[i].max_new_tokens))
        batches = pack(
            order,
            rows=lambda first: self.limits.rows(len(contexts[first]) + requests[first].max_new_tokens, 0),
            waste=lambda first, index: 0,
            patience=0,
            fits=lambda first, index: (
                len(contexts[first]) == len(contexts[index])
                and requests[first].max_new_tokens == requests[index].max_new_tokens
            ),
        )
        for batch in batches:
            answers = [Answer(self.tokenizer, contexts[index], requests[index].stops, self.end_ids) for index in batch]
            self._decode([contexts[index] for index in batch], answers, requests[batch[0]].max_new_tokens)
            for index, answer in zip(batch, answers, strict=True):
                lost = len(requests[index].context) - len(contexts[index])
                found[index] = Generated(answer.finish(), truncated=lost)
            progress(len(batch))
        return [found[index] for index in range(len(requests))]

    def _decode(self, contexts: Sequence[Sequence[int]], answers: Sequence[Answer], max_new_tokens: int) -> None:
        ids = torch.tensor(contexts, device=self.device)

        def ended(seen: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            tokens = seen[:, -1].tolist()
            ends = [answer.add(token) for answer, token in zip(answers, tokens, strict=True)]
            return torch.tensor(ends, device=self.device)

        with torch.no_grad():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                max_new_tokens=max_new_tokens,
                pad_token_id=self.tokenizer.eod_id,
                stopping_criteria=[ended],
            )


def _taken(cache: Any, rows: Sequence[int]) -> Any:
    """A cache with copies of these rows of another's, which stays as it is."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in made.layers:
        for name, value in list(vars(layer).items()):
            if isinstance(value, Tensor):
                setattr(layer, name, value[torch.tensor(rows)] if name in ("keys", "values") else value.clone())
    return made


def load_huggingface(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """AutoModelForCausalLM of a folder. Raises EvalError that says why transformers cannot load one."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise EvalError(f"{folder}: transformers cannot load a causal language model from it: {error}") from error
    return model.to(device).eval()


def window_of_config(folder: Path) -> int:
    """What config.json, or its class's default, says. Raises EvalError when neither does."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise EvalError(f"{folder}: transformers cannot read its config.json: {error}") from error
    return _longest(config)


def _longest(config: Any) -> int:
    text = config.get_text_config()
    for name in _LENGTHS:
        length = getattr(text, name, None)
        if isinstance(length, int) and 0 < length < 2**30:
            return length
    raise EvalError(f"the config of this {config.model_type} model does not say how long a text may be; set max_length")
