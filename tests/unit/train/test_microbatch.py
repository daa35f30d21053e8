"""The search for the size of a microbatch, with a made-up GPU."""

import json

import pytest
import torch

from llmtrain.train.microbatch import Trial, fastest, is_out_of_memory, remember, remembered, search

SIZES = [1, 2, 3, 4, 6, 8, 12, 24]
STATIC, EACH = 10.0, 5.0


def attempts(memory: float, slower_from: int = 100) -> tuple[list[int], object]:
    """The sizes that are tried, and a GPU of so much memory on which each sequence takes less time the more there are."""
    tried: list[int] = []

    def attempt(size: int) -> Trial | None:
        tried.append(size)
        peak = STATIC + EACH * size
        return Trial(size, 1 + 1 / size + (size >= slower_from), peak) if peak <= memory else None

    return tried, attempt


def searched(memory: float, start: int, slower_from: int = 100) -> tuple[list[int], list[int]]:
    """(sizes tried, sizes that fit)"""
    tried, attempt = attempts(memory, slower_from)
    found = search(SIZES, start, attempt, fixed=STATIC, limit=memory)  # type: ignore[arg-type]
    return tried, [trial.size for trial in found]


def test_larger_sizes_are_tried_as_long_as_they_would_fit():
    assert searched(memory=45, start=4) == ([4, 6], [4, 6])  # 8 would take 50


def test_no_size_is_tried_that_would_not_fit():
    assert searched(memory=39, start=4) == ([4], [4])


def test_a_larger_size_that_leaves_too_little_memory_is_not_taken():
    """Its trial fits, but takes more than in proportion."""
    trials = {4: Trial(4, 2.0, 30.0), 6: Trial(6, 1.0, 44.0)}
    assert search(SIZES, 4, trials.get, fixed=STATIC, limit=42.0) == [trials[4]]


def test_smaller_ones_where_the_estimate_was_too_low():
    assert searched(memory=22, start=6) == ([6, 4, 3, 2], [2])


def test_the_search_ends_where_a_larger_one_is_slower():
    tried, found = searched(memory=1000, start=2, slower_from=4)
    assert tried == found == [2, 3, 4]


def test_it_makes_few_trials():
    assert len(searched(memory=1000, start=1)[0]) == 4


def test_nothing_fits():
    assert searched(memory=12, start=3) == ([3, 2, 1], [])


def test_the_fastest_per_sequence_is_taken():
    assert fastest([Trial(2, 0.5, 1.0), Trial(4, 0.4, 2.0), Trial(8, 0.45, 3.0)]).size == 4


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_memory_on_either_vendor(error, expected):
    assert is_out_of_memory(error) == expected


def test_sizes_are_remembered_by_what_they_depend_on(tmp_path):
    path = tmp_path / "run" / "microbatch.json"
    assert remembered(path, "a", SIZES) is None
    for key, size in (("a", 4), ("b", 8)):
        remember(path, key, Trial(size, 0.1, 1.0), [])
    assert [remembered(path, key, SIZES) for key in "abc"] == [4, 8, None]


@pytest.mark.parametrize(
    "content",
    [
        *("half a fi", "", "[]", "7", '"a"', '{"a": 4}', '{"a": {}}', "[" * 300_000, "\0"),
        *(json.dumps({"a": {"microbatch_size": size}}) for size in (0, -4, 5, 48, True, 4.0, "4", None, [4])),
    ],
)
def test_what_is_no_size_of_this_run_is_not_taken_and_is_replaced(tmp_path, content):
    path = tmp_path / "microbatch.json"
    path.write_text(content)
    assert remembered(path, "a", SIZES) is None
    remember(path, "a", Trial(8, 0.1, 1.0), [])
    assert remembered(path, "a", SIZES) == 8


def test_a_run_goes_on_where_nothing_can_be_remembered(tmp_path, caplog):
    (tmp_path / "microbatch.json" / "thesis").mkdir(parents=True)
    remember(tmp_path / "microbatch.json", "a", Trial(8, 0.1, 1.0), [])
    assert "not remembered, so the next start searches again" in caplog.text
