"""Packed batches, and what a model must make of them: the same as of their documents one by one."""

import torch
from torch import Tensor

from llmtrain.data.loader.batches import PackedBatch, collate_packed
from llmtrain.models.causal_lm import CausalLM
from tests.support.models import VOCAB

EOD = 0
LENGTHS = ((13, 1, 2, 20, 9), (1, 44), (45,))
"""Tokens of the documents of each sequence; the last goes on in another sequence."""


def packed_batch() -> PackedBatch:
    """[3, 45]: longer than a chunk of the scan, whose borders fall inside documents."""
    rows = torch.randint(1, VOCAB, (3, 45), generator=torch.Generator().manual_seed(1))
    for row, lengths in zip(rows, LENGTHS, strict=True):
        row[torch.tensor(lengths[:-1], dtype=torch.long).cumsum(0) - 1] = EOD
    samples = [{"tokens": row.numpy(), "sample_id": i, "text_bytes": -1} for i, row in enumerate(rows)]
    return collate_packed(samples, EOD)


def together(model: CausalLM, batch: PackedBatch) -> dict[str, Tensor]:
    """The loss and every gradient of a packed batch."""
    out = model.loss(batch["input_ids"], batch["labels"], batch["document_ids"])
    return _with_gradients(model, out.loss)


def apart(model: CausalLM, batch: PackedBatch) -> dict[str, Tensor]:
    """The same from one forward pass per document, weighted by tokens. model: need not know documents."""
    losses, tokens = [], 0
    for row, lengths in zip(batch["input_ids"], LENGTHS, strict=True):
        for document in row.split(lengths):
            if len(document) > 1:
                out = model.loss(document[None, :-1], document[None, 1:])
                losses.append(out.loss * out.n_tokens)
                tokens += len(document) - 1
    return _with_gradients(model, torch.stack(losses).sum() / tokens)


def _with_gradients(model: CausalLM, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    found = torch.autograd.grad(loss, list(model.parameters()))
    return {"loss": loss.detach(), **dict(zip(names, found, strict=True))}


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor], relative: float = 2e-5) -> None:
    """The loss, and every gradient in the norm of the whole tensor. A key's bias has none but for rounding."""
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert (ours[name] - value).norm() <= relative * value.norm() + 1e-7, (name, ours[name], value)
