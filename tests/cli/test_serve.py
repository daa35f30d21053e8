"""`llmtrain serve` as a process: a run behind OpenAI's API, until SIGTERM."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llmtrain.cli import main
from tests.support import checkpoints
from tests.support.served import ended, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    return checkpoints.save(folder, checkpoints.mpt(64, 2, 270))


async def stream(client: aiohttp.ClientSession, body: dict[str, Any], begun: asyncio.Event | None = None) -> list[str]:
    events = []
    async with client.post("/v1/completions", json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            events += [line.decode().strip().removeprefix("data: ")] if line.strip() else []
            if begun is not None:
                begun.set()
    return events


def test_answers_until_sigterm_and_lets_end_what_runs(model):
    async def use(address: str, process: subprocess.Popen[str]) -> list[str]:
        async with aiohttp.ClientSession(address) as client:
            begun = asyncio.Event()
            body = {"prompt": "the quick", "max_tokens": 300, "ignore_eos": True, "logprobs": 0}
            answer = asyncio.create_task(stream(client, body, begun))
            await begun.wait()
            process.send_signal(signal.SIGTERM)
            return await answer

    with serving(model, "--max-len", "400") as (process, address):
        events = asyncio.run(use(address, process))
        status, rest = ended(process)
    assert events[-1] == "[DONE]" and status == 0
    assert sum(len(json.loads(one)["choices"][0]["logprobs"]["tokens"]) for one in events[:-1]) == 300
    assert "SIGTERM: ending; 1 bodies are being answered" in rest and "Traceback" not in rest


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
NO_HTTP = {
    b"chunked, without a number": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b" 400 "),
    b"chunked, wrong further on": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n", b" 400 "),
    b"a long header": (HEAD + b"X: " + b"a" * 20_000 + b"\r\n\r\n", b" 400 "),
    b"two lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", b" 400 "),
    b"TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b" 400 "),
    b"compressed": (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", b" 415 "),
    b"cut": (HEAD + b"Content-Length: 9\r\n\r\n{", b""),
}


@pytest.mark.ci
def test_what_is_no_http_is_refused_without_a_traceback(model):
    async def use(address: str) -> None:
        for what, (sent, status) in NO_HTTP.items():
            reader, writer = await asyncio.open_connection(*address.removeprefix("http://").split(":"))
            writer.write(sent)
            if not status:
                writer.write_eof()
            assert status in await asyncio.wait_for(reader.read(100), 20), what
            writer.close()
        async with aiohttp.ClientSession(address) as client:
            assert (await stream(client, {"prompt": "the", "max_tokens": 2}))[-1] == "[DONE]"

    with serving(model) as (process, address):
        asyncio.run(use(address))
        process.send_signal(signal.SIGTERM)
        status, rest = ended(process)
    assert status == 0 and "Traceback" not in rest and "rror" not in rest, rest


def test_rejects_what_it_cannot_serve(model, tmp_path, capsys):
    taken = socket.create_server(("127.0.0.1", 0))
    (tmp_path / "key").write_text("two words\n")
    (tmp_path / "empty").mkdir()
    port = str(taken.getsockname()[1])
    cases = [
        ([str(model), "--port", port], f"cannot listen on 127.0.0.1:{port}"),
        ([str(model), "--port", "65536"], "--port 65536: expected at most 65535"),
        ([str(model), "--rows", "0"], "--rows 0: expected at least 1"),
        ([str(model), "--host", "nowhere.invalid"], "cannot listen on nowhere.invalid:8000"),
        ([str(model), "--key-file", str(tmp_path / "key")], "expected one key of ASCII characters without spaces"),
        ([str(model), "--key-file", str(tmp_path / "none")], "cannot be read"),
        ([str(model), "--chat-template", str(tmp_path / "none.jinja")], "chat_template"),
        ([str(tmp_path / "empty")], str(tmp_path / "empty")),
        ([str(model), "--max-waiting", "9" * 24], "expected at most 1000000"),
        ([str(model), "--max-body", "9" * 24], "expected at most 1099511627776"),
        ([str(model), "--max-len", "9" * 24], "expected at most 100000000"),
        (
            [str(model), "--keys-mib", "0.01", "--max-len", "64"],
            "0.0 MiB hold keys of 0 tokens in pages of 32; a request of 64",
        ),
        ([str(model), "--keys-mib", "1", "--deterministic"], "with deterministic, leave their memory out"),
        ([str(model), "--max-len", "100000000", "--rows", "1000000"], "no memory for --rows 1000000 of --max-len 1000"),
    ]
    for arguments, message in cases:
        assert main(["serve", *arguments]) == 2
        assert message in capsys.readouterr().err
    taken.close()


def memory(process: subprocess.Popen[str]) -> int:
    """Resident KiB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0])


MALFORMED = [
    b"{",
    b"[1]",
    b"\xff",
    b"{}",
    b'{"prompt": 1}',
    b'{"prompt": "a", "tmp": 1}',
    b'{"prompt": "a", "n": 1000}',
]


async def soak(address: str, process: subprocess.Popen[str], requests: int) -> tuple[list[int], dict[str, float]]:
    """Send requests, of which some are malformed and some clients vanish. Returns memory after each tenth, and the metrics."""
    rng, sizes = random.Random(0), []

    async def one(client: aiohttp.ClientSession, number: int) -> None:
        kind = number % 5
        body = {"prompt": "the fox " * rng.randint(1, 30), "max_tokens": rng.randint(1, 30), "stream": number % 2 == 0}
        if kind == 0:
            async with client.post("/v1/completions", data=rng.choice(MALFORMED)) as response:
                assert response.status == 400 and (await response.json())["error"]["message"]
        elif kind == 1:
            try:
                async with asyncio.timeout(rng.random() * 0.04):
                    await stream(client, body | {"max_tokens": 200, "ignore_eos": True})
            except TimeoutError:
                pass
        else:
            async with client.post("/v1/completions", json=body) as response:
                assert response.status == 200 and await response.read()

    async def metrics(client: aiohttp.ClientSession) -> dict[str, float]:
        async with client.get("/metrics") as response:
            lines = [line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#"]
        return {name.removeprefix("llmtrain_"): float(value) for name, value in lines}

    found: dict[str, float] = {}
    for tenth in range(10):
        # Connections of their own: a client that vanishes closes its connection.
        async with aiohttp.ClientSession(address, connector=aiohttp.TCPConnector(force_close=True)) as client:
            first = tenth * requests // 10
            for begin in range(first, first + requests // 10, 20):
                await asyncio.gather(*(one(client, number) for number in range(begin, begin + 20)))
            for _ in range(5000):
                found = await metrics(client)
                if found["requests_running"] == found["requests_waiting"] == 0:
                    break
                await asyncio.sleep(0.02)
        assert found["requests_running"] == found["requests_waiting"] == 0, "a slot was lost"
        sizes.append(memory(process))
    return sizes, found


@pytest.mark.parametrize(
    "requests", [pytest.param(1000, marks=pytest.mark.ci), pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_clients_that_vanish_and_err_cost_no_slot_and_no_memory(model, requests):
    with serving(model, "--max-len", "512", "--rows", "8", "--prefix-mib", "1") as (process, address):
        sizes, found = asyncio.run(soak(address, process, requests))
        process.send_signal(signal.SIGTERM)
        status, rest = ended(process)
    assert status == 0 and "Traceback" not in rest and "rror" not in rest, rest
    assert found["refused_total"] == requests // 5 and found['requests_total{end="error"}'] == 0
    assert found['requests_total{end="cancelled"}'] > requests // 20
    assert sizes[-1] - sizes[2] < 20_000, sizes


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.ci if n < 2 else pytest.mark.slow) for n in range(50)]
)
def test_sigterm_at_any_time_ends_without_a_traceback(model, number):
    rng = random.Random(number)

    async def one(client: aiohttp.ClientSession) -> int:
        body = {"prompt": "the fox", "max_tokens": 100, "ignore_eos": True, "stream": rng.random() < 0.5}
        try:
            async with client.post("/v1/completions", json=body) as response:
                text = await response.text()
                assert response.status != 200 or '"finish_reason": "length"' in text, "an answer was cut off"
                return response.status
        except aiohttp.ClientConnectionError:  # it came when the server had ended
            return 0

    async def use(address: str, process: subprocess.Popen[str]) -> list[int]:
        async with aiohttp.ClientSession(address) as client:
            answers = [asyncio.create_task(one(client)) for _ in range(12)]
            await asyncio.sleep(rng.random() * 0.4)
            process.send_signal(signal.SIGTERM)
            answers += [asyncio.create_task(one(client)) for _ in range(3)]
            return list(await asyncio.gather(*answers))

    with serving(model, "--rows", "4") as (process, address):
        statuses = asyncio.run(use(address, process))
        status, rest = ended(process)
    assert status == 0 and "Traceback" not in rest and "exception" not in rest.lower(), rest
    assert set(statuses) <= {0, 200, 503}


@pytest.mark.ci
def test_a_second_signal_ends_what_runs(model):
    async def use(address: str, process: subprocess.Popen[str]) -> list[str]:
        async with aiohttp.ClientSession(address) as client:
            begun = asyncio.Event()
            body = {"prompt": "the", "max_tokens": 8000, "ignore_eos": True, "logprobs": 0}
            answer = asyncio.create_task(stream(client, body, begun))
            await begun.wait()
            process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGINT)
            return await answer

    with serving(model, "--max-len", "9000") as (process, address):
        events = asyncio.run(use(address, process))
        status, rest = ended(process)
    assert status == 130 and "Traceback" not in rest
    assert "the engine failed or was ended" in events[-1]


@pytest.mark.ci
@pytest.mark.parametrize("killed", ["engine", "front"])
def test_each_process_of_a_server_ends_with_the_other(model, killed):
    with serving(model) as (process, _):
        (front,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(process.pid if killed == "engine" else int(front), signal.SIGKILL)
        status, rest = ended(process)  # once neither process writes any more
    assert "Traceback" not in rest
    if killed == "engine":
        assert status == -signal.SIGKILL and "the engine's process has ended, and with it this server" in rest
    else:
        assert status == 1 and rest.endswith("the process that speaks HTTP was ended by SIGKILL\n")
