"""Any causal language model of transformers: whole rows padded on the right, one forward pass per batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from llmtrain.data.tokenizer import TextTokenizer
from llmtrain.eval.ahead import idle
from llmtrain.eval.batching import Limits, Row, pack, rows_of
from llmtrain.eval.errors import EvalError
from llmtrain.eval.generation import Answer, cut_context
from llmtrain.eval.request import Generate, Generated, Score, Scored
from llmtrain.models.loss import IGNORE

_LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
_LOGITS = 2**29
"""Elements of the logits of one batch, for models that give them for every token."""


class HuggingFaceScorer:
    """max_batch_tokens: read at a time, padding included; default 16,384 on a GPU and 4,096 on a CPU.

    Raises EvalError when the model's config does not say how long a text may be and `max_length` does not either.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: TextTokenizer,
        *,
        max_length: int | None = None,
        max_batch_tokens: int | None = None,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.window = max_length or _longest(model.config)
        self.device = next(model.parameters()).device
        self.vocab_size = model.config.get_text_config().vocab_size
        on_gpu = self.device.type == "cuda"
        self.limits = Limits(max_batch_tokens or (16_384 if on_gpu else 4096), 1024 if on_gpu else 128)
        self.keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

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
        for batch in self._batches(rows.rows):
            for row, score in self._read([rows.rows[row] for row in batch], batch):
                found[row] = score
                progress(users[row])
        return [
            Scored(*found[place], tokens=rows.rows[place].scored, truncated=truncated)
            for place, truncated in zip(rows.place, rows.truncated, strict=True)
        ]

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[int]]:
        def most(first: int) -> int:
            length = rows[first].length
            return max(min(self.limits.rows(length, length), _LOGITS // (self.vocab_size * length)), 1)

        yield from pack(
            sorted(range(len(rows)), key=lambda row: (-rows[row].length, -rows[row].scored)),
            rows=most,
            waste=lambda first, row: rows[first].length - rows[row].length,
            patience=self.limits.patience,
        )

    def _read(self, rows: Sequence[Row], numbers: Sequence[int]) -> Iterator[tuple[int, tuple[float, bool]]]:
        width = max(row.length for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        labels = torch.full((len(rows), width), IGNORE)
        for i, row in enumerate(rows):
            ids[i, : row.length] = torch.tensor(row.tokens[:-1])
            labels[i, row.start : row.length] = torch.tensor(row.tokens[-row.scored :])
        # No attention mask: what is padded comes after all that is scored, and causal models do not look ahead.
        keep = width - min(row.start for row in rows)
        options = {"logits_to_keep": keep} if self.keeps else {}
        with torch.no_grad():
            logits = self.model(ids.to(self.device), use_cache=False, **options).logits[:, -keep:]
        labels = labels[:, -keep:].to(self.device)
        scored = labels != IGNORE
        picked, wanted = logits[scored].float(), labels[scored]
        scores = torch.zeros(labels.shape, dtype=torch.float64, device=self.device)
        greedy = torch.ones_like(scored)
        scores[scored] = (picked.gather(-1, wanted[:, None])[:, 0] - picked.logsumexp(dim=-1)).double()
        greedy[scored] = picked.argmax(dim=-1) == wanted
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
            answers = [Answer(self.tokenizer, contexts[index], requests[index].stops) for index in batch]
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


def load_huggingface(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """AutoModelForCausalLM of a folder. Raises EvalError that says why transformers cannot load one."""
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, KeyError, ImportError) as error:
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
