"""The picture and the average of benchmarks.convergence."""

import pytest

from benchmarks import convergence


def test_the_average_has_no_bias_to_its_beginning():
    assert convergence._smoothed([3.0] * 40) == pytest.approx([3.0] * 40)
    falling = convergence._smoothed([10.0, *[2.0] * 200], half_life=5)
    assert falling[0] == 10 and falling[5] == pytest.approx(2 + 8 * 0.5 / sum(0.5 ** (i / 5) for i in range(6)))
    assert falling[-1] == pytest.approx(2)


def test_each_model_is_drawn_over_tokens_and_seconds(tmp_path):
    one = {
        "parameters": 100_000_000,
        "tokens_per_second": 5e5,
        "tokens": [65_536, 131_072],
        "seconds": [0.2, 0.4],
        "loss": [9.7, 9.1],
    }
    convergence.plot({"a": one, "b": one | {"loss": [9.6, 8.9]}}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_torn_line_of_a_running_log_is_not_read(tmp_path):
    line = '{"step": %d, "loss/train/cross_entropy": 5.0, "throughput/step_seconds": 0.5}'
    (tmp_path / "metrics.jsonl").write_text(
        f'{line % 1}\n{{"step": 1, "loss/validation": 1.0}}\n{line % 2}\n{line[:20]}'
    )
    assert [row["step"] for row in convergence._rows(tmp_path)] == [1, 2]
