"""Rows of requests: what is cut to the window, and where the scored tokens begin."""

import pytest

from llmtrain.eval.prompts.requests import LoglikelihoodRequest
from llmtrain.eval.scoring.batching import make_rows


@pytest.mark.parametrize("cut", [0, 1, 4])
def test_a_row_fills_the_window_and_no_more(cut):
    window, scored = 8, 3
    context = tuple(range(window + 1 - scored + cut))
    made = make_rows([LoglikelihoodRequest(0, 0, context, (90, 91, 92))], window)
    [row] = made.rows
    assert row.tokens == (*context[cut:], 90, 91, 92) and row.length == window and made.truncated == [cut]
    assert row.tokens[row.start] == context[-1], "whose logits score the first token of the continuation"
