"""The Triton attention kernels through Triton's interpreter, on a CPU; and what needs no kernel.

In one process of its own: Triton reads TRITON_INTERPRET when it is imported. The cases are in
interpreted_attention.py, interpreted_attention_float8.py, interpreted_stored_dscores.py and interpreted_prefix_trees.py.
"""

import pytest
import torch

from llmtrain.kernels.attention.documents import documents
from llmtrain.kernels.attention.triton_tiles import parts_of
from tests.support.interpreter import run_interpreted


def test_the_interpreted_kernels_agree_with_the_definition():
    """And scores of packed texts are those of a forward pass per request: interpreted_prefix_trees.py."""
    run_interpreted("attention", "attention_float8", "stored_dscores", "prefix_trees")


@pytest.mark.slow
def test_all_of_their_cases():
    run_interpreted("attention", "stored_dscores", "prefix_trees", cases="slow", timeout=3000)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_parts_make_up_the_head_dim(head_dim):
    parts = parts_of(head_dim)
    assert 0 <= sum(parts) - head_dim < 16
    assert all(part >= 16 and part & (part - 1) == 0 for part in parts)
    assert list(parts) == sorted(set(parts), reverse=True)


def test_documents_are_runs_of_equal_ids():
    ids = torch.tensor([[0, 0, 0, 1, 1, 0], [-1, -1, 3, 3, 3, -1], [7, 8, 9, 9, -2, 4]])
    found = documents(ids)
    assert found.starts.dtype == found.ends.dtype == torch.int32
    # Padding: from the next token to the one before, which is nothing.
    assert found.starts.tolist() == [[0, 0, 0, 3, 3, 5], [1, 2, 2, 2, 2, 6], [0, 1, 2, 2, 5, 5]]
    assert found.ends.tolist() == [[2, 2, 2, 4, 4, 5], [-1, 0, 4, 4, 4, 4], [0, 1, 3, 3, 3, 5]]
    for bound in (found.starts, found.ends):
        assert (bound.diff(dim=1) >= 0).all()
