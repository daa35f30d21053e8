"""The task of benchmarks recall."""

import torch

from benchmarks.programs.training.recall import KEYS, PAIRS, VALUES, batch


def test_every_label_is_the_value_that_lies_behind_the_same_key_in_the_text():
    ids, labels = batch(3, 5, 64)
    asked = labels != -100
    assert (asked.sum(1) == PAIRS).all() and asked[:, -2 * PAIRS :].sum() == 5 * PAIRS
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        text = row[: -2 * PAIRS]
        for at, value in enumerate(label):
            if value != -100:
                assert row[at] < KEYS <= value < KEYS + VALUES
                assert text.count(row[at]) == 1 and text[text.index(row[at]) + 1] == value == row[at + 1]


def test_the_text_follows_from_the_step_alone():
    assert all(map(torch.equal, batch(7, 2, 40), batch(7, 2, 40)))
    assert not torch.equal(batch(7, 2, 40)[0], batch(8, 2, 40)[0])
