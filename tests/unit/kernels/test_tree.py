"""Which keys a token of a tree of texts sees, against the definition."""

from __future__ import annotations

import random

import torch

from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.tree import Tree, refusal, tree
from llmtrain.kernels.platform import Platform, cpu

# A prompt with two questions of two answers each, a text alone, a question with three answers.
LENGTHS = [5, 3, 1, 2, 4, 2, 2, 6, 3, 1, 1, 2]
ABOVE = [(), (0,), (0, 1), (0, 1), (0,), (0, 4), (0, 4), (), (), (8,), (8,), (8,)]


def visible(made: Tree) -> torch.Tensor:
    """[T, T]: how many of the parts let i see j."""
    size = made.places.shape[1]
    at = torch.arange(size)
    seen = torch.zeros(size, size, dtype=torch.int64)
    for part in made.parts:
        starts, ends = part.starts[0, :, None], part.ends[0, :, None]
        seen += (at >= starts) & (at <= ends) & (at <= at[:, None])
    return seen


def by_definition(lengths, above) -> tuple[torch.Tensor, list[int]]:
    owner = [i for i, n in enumerate(lengths) for _ in range(n)]
    places = [sum(lengths[k] for k in above[i]) + at for i, n in enumerate(lengths) for at in range(n)]
    seen = [[int((a == b and i >= j) or b in above[a]) for j, b in enumerate(owner)] for i, a in enumerate(owner)]
    return torch.tensor(seen), places


def test_a_token_sees_its_own_segment_and_what_that_continues_once():
    made = tree(LENGTHS, ABOVE)
    seen, places = by_definition(LENGTHS, ABOVE)
    assert torch.equal(visible(made), seen)
    assert made.places[0].tolist() == places
    assert len(made.parts) == 3


def test_intervals_never_fall_as_the_kernels_want_them():
    for part in tree(LENGTHS, ABOVE).parts:
        for edge in (part.starts, part.ends):
            assert edge.dtype == torch.int32 and edge.is_contiguous()
            assert (edge[0].diff() >= 0).all()


def test_distances_are_those_in_the_text():
    made = tree(LENGTHS, ABOVE)
    places, at = made.places[0], torch.arange(sum(LENGTHS))
    for part, apart in zip(made.parts[1:], made.apart[1:], strict=True):
        for i in random.Random(0).sample(range(len(at)), 20):
            for j in range(int(part.starts[0, i]), int(part.ends[0, i]) + 1):
                assert i - j - apart[i] == places[i] - places[j]


def test_texts_alone_have_one_part():
    made = tree([3, 1, 4], [(), (), ()])
    assert len(made.parts) == 1 and made.places[0].tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


def test_it_moves_in_one_piece():
    made = tree(LENGTHS, ABOVE)
    moved = made.to(torch.device("cpu"))
    assert torch.equal(moved.places, made.places)
    for a, b in zip(moved.parts, made.parts, strict=True):
        assert torch.equal(a.starts, b.starts) and torch.equal(a.ends, b.ends) and a.starts.is_contiguous()
    assert moved.apart[0] is None
    assert all(torch.equal(a, b) for a, b in zip(moved.apart[1:], made.apart[1:], strict=True))


def test_a_window_and_a_machine_without_our_kernels_are_refused():
    h200 = Platform("nvidia", "sm90", "", 1 << 36)
    assert refusal(AttentionSpec(4, 4, 64, 0.1, alibi_max_bias=8.0, softcap=2.0), h200) is None
    assert "window" in (refusal(AttentionSpec(4, 4, 64, 0.1, sliding_window=9), h200) or "")
    assert "GPU" in (refusal(AttentionSpec(4, 4, 64, 0.1), cpu()) or "")
