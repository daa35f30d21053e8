"""PyTorch's attention for sequences of several lengths: what is made of a batch's documents."""

import torch

from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.varlen import VarlenAttention


def test_varlen_has_where_documents_begin_and_rounds_what_decides_shapes():
    ids = torch.tensor([[3, 3, 3, 5, 5, 3], [3, 3, -1, -1, -1, -1]])
    context = VarlenAttention(AttentionSpec(2, 2, 16, 0.25, documents=True)).prepare(6, torch.device("cpu"), ids)
    assert context is not None
    assert context.starts.tolist() == [0, 3, 5, 6, 8, 12, 12, 12, 12]
    assert context.starts.dtype == torch.int32
    assert context.longest == 4


def test_varlen_counts_a_window_without_the_query():
    spec = AttentionSpec(2, 2, 16, 0.25, sliding_window=8)
    assert VarlenAttention(spec).window == (7, 0)
    assert VarlenAttention(AttentionSpec(2, 2, 16, 0.25, documents=True)).window == (-1, 0)
