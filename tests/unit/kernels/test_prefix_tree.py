"""Which keys a token of a tree of texts sees, against the definition."""

import random

import torch

from llmtrain.kernels.attention.prefix_tree import BLOCK_QUERIES, PrefixTree, build_prefix_tree, refusal
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.platform import Platform, cpu

# A prompt with two questions of two answers each, a text alone, a question with three answers.
LENGTHS = [5, 3, 1, 2, 4, 2, 2, 6, 3, 1, 1, 2]
ABOVE = [(), (0,), (0, 1), (0, 1), (0,), (0, 4), (0, 4), (), (), (8,), (8,), (8,)]


def visible(made: PrefixTree) -> torch.Tensor:
    """[T, T]: how many of the parts let i see j."""
    at = torch.arange(made.positions.shape[1])
    seen = (at >= made.segments.starts[0, :, None]) & (at <= made.segments.ends[0, :, None]) & (at <= at[:, None])
    return sum(((at >= d.starts[:, None]) & (at <= d.ends[:, None])).int() for d in made.depths) + seen.int()


def by_definition(lengths, ancestors) -> tuple[torch.Tensor, list[int]]:
    owner = [i for i, n in enumerate(lengths) for _ in range(n)]
    places = [sum(lengths[k] for k in ancestors[i]) + at for i, n in enumerate(lengths) for at in range(n)]
    seen = [[int((a == b and i >= j) or b in ancestors[a]) for j, b in enumerate(owner)] for i, a in enumerate(owner)]
    return torch.tensor(seen), places


def test_a_token_sees_its_own_segment_and_what_that_continues_once():
    made = build_prefix_tree(LENGTHS, ABOVE)
    seen, places = by_definition(LENGTHS, ABOVE)
    assert torch.equal(visible(made), seen.int())
    assert made.positions[0].tolist() == places
    assert len(made.depths) == 2


def test_intervals_never_fall_as_the_kernels_want_them():
    made = build_prefix_tree(LENGTHS, ABOVE)
    for part in (made.segments, *made.depths):
        for edge in (part.starts, part.ends):
            assert edge.dtype == torch.int32 and edge.is_contiguous()
            assert (edge.flatten().diff() >= 0).all()


def test_distances_are_those_in_the_text():
    made = build_prefix_tree(LENGTHS, ABOVE)
    places, at = made.positions[0], torch.arange(sum(LENGTHS))
    for depth in made.depths:
        for i in random.Random(0).sample(range(len(at)), 20):
            for j in range(int(depth.starts[i]), int(depth.ends[i]) + 1):
                assert i - j - depth.distance_offset[i] == places[i] - places[j]


def test_tiles_are_those_that_see_anything():
    lengths, ancestors = [*LENGTHS, 200, 3, 90], [*ABOVE, (), (), (12,)]
    made = build_prefix_tree(lengths, ancestors)
    for depth in made.depths:
        sees = {int(i) // BLOCK_QUERIES for i in torch.nonzero(depth.starts <= depth.ends)}
        assert depth.tiles.tolist() == sorted(sees)
    assert len(made.depths[0].tiles) < sum(lengths) // BLOCK_QUERIES


def test_texts_alone_have_no_depth():
    made = build_prefix_tree([3, 1, 4], [(), (), ()])
    assert not made.depths and made.positions[0].tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


def test_it_moves_whole():
    made = build_prefix_tree(LENGTHS, ABOVE)
    moved = made.to(torch.device("cpu"))
    assert torch.equal(moved.positions, made.positions)
    for a, b in zip((moved.segments, *moved.depths), (made.segments, *made.depths), strict=True):
        assert all(
            torch.equal(x, y) and x.dtype == torch.int32
            for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
        )


def test_a_window_and_a_machine_without_our_kernels_are_refused():
    h200 = Platform("nvidia", "sm90", "", 1 << 36)
    assert refusal(AttentionSpec(4, 4, 64, 0.1, alibi_max_bias=8.0, softcap=2.0), h200) is None
    assert "window" in (refusal(AttentionSpec(4, 4, 64, 0.1, sliding_window=9), h200) or "")
    assert "GPU" in (refusal(AttentionSpec(4, 4, 64, 0.1), cpu()) or "")
