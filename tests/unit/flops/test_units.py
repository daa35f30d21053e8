"""Units that suit a number's size."""

import pytest

from llmtrain.flops.units import binary, decimal, duration, share, significant


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 FLOP"), (256, "256 FLOP"), (0.5, "0.5000 FLOP"), (1500, "1.500 kFLOP"), (28.9e9, "28.90 GFLOP")],
)
def test_decimal(value, shown):
    assert decimal(value, "FLOP") == shown


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (1023, "1,023 B"), (12.5 * 2**20, "12.50 MiB"), (2**41, "2.000 TiB")]
)
def test_binary(size, shown):
    assert binary(size) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0000005, "500 ns"), (0.012, "12.0 ms"), (90, "1.50 minutes"), (86_400e3, "1,000 days")]
)
def test_duration(seconds, shown):
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("part", "decimals", "shown"), [(0, 0, "0%"), (0.004, 0, "<1%"), (0.0004, 1, "<0.1%"), (0.25, 1, "25.0%")]
)
def test_share(part, decimals, shown):
    assert share(part, decimals) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (0.00123, "0.00123"), (0.05, "0.0500"), (1.234, "1.23"), (12_345.6, "12,346")]
)
def test_significant(value, shown):
    assert significant(value, 3) == shown
