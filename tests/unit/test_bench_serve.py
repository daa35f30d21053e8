"""`llmtrain bench serve`: figures from known times, arrivals, and a sweep over a real server."""

import asyncio
import itertools
import json
import math
import threading
from collections.abc import Iterator

import pytest

from llmtrain.bench.serve.figures import figures
from llmtrain.bench.serve.load import Case, Target, Timing, arrivals, bodies
from llmtrain.cli import main
from tests.support.served import make_server, served, tiny_model, tokenizer

TARGET = Target("http://x/v1", "m")


def test_figures_follow_the_definitions():
    first = Timing(first=0.1, whole=1.1, gaps=[0.4, 0.6], prompt_tokens=10, tokens=5)
    second = Timing(first=0.3, whole=0.3, prompt_tokens=10, tokens=1)
    made = figures([first, second, Timing(error="broken")], 2.0, {"ttft": 200, "tpot": 260})
    assert (made["completed"], made["failed"], made["errors"]) == (2, 1, ["broken"])
    assert made["requests_per_second"] == 1 and made["output_tokens_per_second"] == 3
    assert made["total_tokens_per_second"] == 13
    assert made["tpot_ms"] == pytest.approx({"mean": 250, "p50": 250, "p90": 250, "p99": 250})  # of one token: none
    assert made["ttft_ms"] == pytest.approx({"mean": 200, "p50": 200, "p90": 280, "p99": 298})
    assert made["itl_ms"]["p50"] == pytest.approx(500) and made["e2el_ms"]["mean"] == pytest.approx(700)
    assert made["goodput"] == 0.5
    assert figures([first], 1.0, {"ttft": 200, "itl": 500})["goodput"] == 0, "each gap counts"


def test_arrivals_are_those_of_the_rate_and_burstiness():
    assert arrivals(Case(1, 1, 3)) == [0, 0, 0]
    for burstiness in (0.2, 1.0, 1e4):
        at = arrivals(Case(1, 1, 4000, rate=5, burstiness=burstiness))
        gaps = [b - a for a, b in itertools.pairwise(at)]
        mean = sum(gaps) / len(gaps)
        deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
        assert mean == pytest.approx(0.2, rel=0.15) and deviation / mean == pytest.approx(burstiness**-0.5, rel=0.15)
    assert arrivals(Case(1, 1, 9, rate=5)) == arrivals(Case(1, 1, 9, rate=5)) != arrivals(Case(1, 1, 9, rate=5, seed=1))


def test_lengths_spread_evenly_and_prompts_repeat_with_the_seed():
    made = bodies(Case(40, 10, 300, spread=0.5), TARGET)
    lengths = {len(body["prompt"]) for body in made}
    assert min(lengths) == 20 and max(lengths) == 60 and {body["max_tokens"] for body in made} == set(range(5, 16))
    assert made == bodies(Case(40, 10, 300, spread=0.5), TARGET)
    assert len(bodies(Case(40, 10, 1), Target("u", "m", ids=None))[0]["prompt"].split()) == 40


@pytest.fixture
def address() -> Iterator[str]:
    """A server in a thread of its own."""
    found: list[str] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with served(make_server(tiny_model(), tokenizer())) as client:
            found.append(str(client._base_url))
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(300)
    yield found[0]
    done.set()
    thread.join(30)


def test_a_sweep_writes_rows_a_table_and_a_picture(address, tmp_path, capsys):
    options = ["--requests", "5", "--ids", "200", "--warm-up", "1", "--goodput", "ttft:100000"]
    options += ["--out", str(tmp_path / "out"), "--users", "1", "4", "--lengths", "9/5", "6/3", "--rates", "50", "inf"]
    assert main(["bench", "serve", address, *options]) == 0
    rows = json.loads((tmp_path / "out" / "serve.json").read_text())
    assert [(row["prompt"], row["users"], row["rate"]) for row in rows] == [
        (prompt, users, rate) for prompt in (9, 6) for users in (1, 4) for rate in (50.0, "inf")
    ]
    for row in rows:
        assert row["completed"] == 5 and row["failed"] == 0 and row["goodput"] == row["requests_per_second"] > 0
        assert row["output_tokens_per_second"] * row["seconds"] == pytest.approx(5 * row["answer"])
        assert 0 < row["ttft_ms"]["p50"] <= row["e2el_ms"]["p50"] <= row["e2el_ms"]["p99"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and lines[2].startswith("| 9/5 | 50.0 | 1 |")
    assert (tmp_path / "out" / "serve.png").read_bytes().startswith(b"\x89PNG")
    # Every request is refused: too long.
    refused = ["--requests", "2", "--warm-up", "0", "--lengths", "100/5", "--out", str(tmp_path / "two")]
    assert main(["bench", "serve", address, *refused]) == 1
    assert "all 2 requests failed: status 400" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "960"], "--lengths 960: expected PROMPT/ANSWER"),
        (["--lengths", "0/3"], "--lengths 0/3: expected PROMPT/ANSWER"),
        (["--goodput", "tft:3"], "--goodput tft:3: expected MEASURE:MILLISECONDS"),
        (["--goodput", "ttft:nan"], "--goodput ttft:nan: expected MEASURE:MILLISECONDS"),
        (["--rates", "0"], "--rates: expected numbers above 0"),
        (["--rates", "nan"], "--rates: expected numbers above 0"),
        (["--users", "0"], "--users: expected numbers above 0"),
        (["--requests", "0"], "--requests 0: expected at least 1"),
        (["--requests", "9" * 20], "expected at most 1000000"),
        (["--spread", "2"], "--spread 2.0: expected at most 1"),
        (["--key-variable", "NOT_HERE"], "--key-variable NOT_HERE: the environment has no such variable"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: /dev/null is a file, not a folder; choose another"),
        ([], "/v1/models does not answer as OpenAI's API does"),
    ],
)
def test_rejects_wrong_options_and_a_server_that_is_none(arguments, message, capsys):
    assert main(["bench", "serve", "http://127.0.0.1:9", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("url", ["here", "file:///etc/hosts", "http://", "http://a:99999", "http://[::1", "http://a b"])
def test_rejects_an_address_of_no_server(url, capsys):
    assert main(["bench", "serve", url]) == 2
    assert (
        capsys.readouterr().err == f"{url} is no address of a server; expected http://HOST:PORT, with or without /v1\n"
    )
