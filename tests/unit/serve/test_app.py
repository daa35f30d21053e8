"""OpenAI's API over the engine: answers, streams, refusals, clients that go away."""

import asyncio
import json
import threading
from typing import Any

import aiohttp
import pytest

from llmtrain.generate.engine import Engine, Token
from llmtrain.generate.options import Sampling
from llmtrain.generate.text import complete
from llmtrain.serve.answers import Piece, merged
from llmtrain.serve.app import Limits
from tests.support.served import engine_of, make_server, served, talk, tiny_model, tokenizer

MODEL, OWN = tiny_model(), tokenizer()


async def post(client: aiohttp.ClientSession, path: str, body: Any, **options: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with client.post(f"/v1/{path}", data=data, **options) as response:
        return response.status, await response.json()


async def streamed(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client.post(f"/v1/{path}", json=body | {"stream": True}) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        events = (await response.text()).removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def expected(prompt: str, new: int, stops: tuple[str, ...] = (), **options: Any) -> str:
    chunks = complete(MODEL, OWN, [prompt], Sampling(**options), max_new_tokens=new, stops=stops)
    return "".join(chunk.text for chunk in chunks)


def test_a_completion_is_that_of_generate_whole_and_streamed():
    async def use(client):
        body = {"prompt": ["the quick", "a lazy"], "max_tokens": 12, "temperature": 0, "logprobs": 2, "model": "tiny"}
        seeded = {"prompt": "fox", "max_tokens": 9, "seed": 5, "top_k": 20}
        return (
            await post(client, "completions", body),
            await streamed(client, "completions", body | {"stream_options": {"include_usage": True}}),
            await post(client, "completions", seeded),
        )

    (status, whole), chunks, (_, seeded) = talk(make_server(MODEL, OWN), use)
    assert status == 200 and whole["object"] == "text_completion" and whole["model"] == "tiny"
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == [expected("the quick", 12, temperature=0), expected("a lazy", 12, temperature=0)] and all(texts)
    assert seeded["choices"][0]["text"] == expected("fox", 9, seed=5, top_k=20)
    assert {choice["finish_reason"] for choice in whole["choices"]} <= {"length", "stop"}
    assert whole["usage"]["completion_tokens"] <= 24 and whole["usage"]["prompt_tokens"] == sum(
        len(OWN.encode(one)) for one in ("the quick", "a lazy")
    )
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    parts: list[dict[str, Any]] = [{"text": "", "tokens": [], "values": [], "offsets": []} for _ in range(2)]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        part = parts[choice["index"]]
        part["text"] += choice["text"]
        part["tokens"] += choice["logprobs"]["tokens"]
        part["values"] += choice["logprobs"]["token_logprobs"]
    for part, choice in zip(parts, whole["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert part["text"] == choice["text"] and part["tokens"] == logprobs["tokens"]
        assert part["values"] == pytest.approx(logprobs["token_logprobs"], abs=1e-5)
        assert all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"])
        assert all(
            max(top.values()) == value
            for top, value in zip(logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True)
        )
        assert logprobs["text_offset"][0] == 0 and len(logprobs["text_offset"]) == len(logprobs["tokens"])


def test_a_stop_string_across_tokens_ends_an_answer():
    text = expected("the quick", 20, temperature=0, top_k=None)
    stop = text[3:6]
    body = {"prompt": "the quick", "max_tokens": 20, "temperature": 0, "stop": [stop]}
    status, found = talk(make_server(MODEL, OWN), lambda client: post(client, "completions", body))
    assert status == 200 and found["choices"][0]["finish_reason"] == "stop"
    assert found["choices"][0]["text"] == text[: text.index(stop)]


def test_a_chat_is_rendered_by_its_template_whole_and_streamed():
    async def use(client):
        body = {
            "messages": [{"role": "user", "content": "the fox"}],
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": True,
        }
        return (
            await post(client, "chat/completions", body | {"top_logprobs": 1, "n": 2}),
            await streamed(client, "chat/completions", body),
            await post(client, "chat/completions", {"messages": [{"content": "x"}]}),
            await post(client, "chat/completions", {"messages": body["messages"], "temperature": 0}),
        )

    (status, whole), chunks, missing, longest = talk(make_server(MODEL, OWN), use)
    assert status == 200 and whole["object"] == "chat.completion"
    first, second = whole["choices"]
    assert first["message"] == second["message"] and first["message"]["role"] == "assistant"
    # "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n": each mark is one token.
    plain = sum(len(OWN.encode(text)) for text in ("user\nthe fox", "\n", "assistant\n"))
    assert whole["usage"]["prompt_tokens"] == plain + 3
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == first["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][:-1] == [None] * (len(chunks) - 1)
    tokens = [
        one for chunk in chunks if chunk["choices"][0]["logprobs"] for one in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert [one["token"] for one in tokens] == [one["token"] for one in first["logprobs"]["content"]]
    assert bytes(tokens[0]["bytes"]).decode() == tokens[0]["token"]
    assert missing == (400, missing[1]) and "message 1 has no `role`" in missing[1]["error"]["message"]
    assert longest[1]["usage"]["total_tokens"] <= 64


def test_content_in_parts_and_nulls_of_clients_mean_what_they_mean_elsewhere():
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    messages = [[{"role": "user", "content": content}] for content in ("the fox", parts)]

    async def use(client):
        body = {"temperature": 0, "max_tokens": 5}
        chats = [(await post(client, "chat/completions", body | {"messages": one}))[1] for one in messages]
        nulls = {"prompt": "the", "stop": None, "stream_options": {"include_usage": None}}
        return chats, await post(client, "completions", body | nulls)

    (first, second), (status, _) = talk(make_server(MODEL, OWN), use)
    assert status == 200 and first["usage"] == second["usage"]
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


def test_pieces_that_wait_are_sent_as_one():
    first, second = (Piece(0, text, (Token(at, -1.0),)) for at, text in enumerate(("a", "b")))
    found = merged([first, Piece(1, "x"), second, Piece(0, "", (), "stop")])
    assert found == [Piece(0, "ab", (Token(0, -1.0), Token(1, -1.0)), "stop"), Piece(1, "x")]


BAD: list[tuple[str, Any, int, str]] = [
    ("completions", b"{", 400, "the body is no JSON object"),
    ("completions", b'{"prompt": "\xff"}', 400, "not UTF-8"),
    ("completions", b"[1]", 400, "it is no object"),
    ("completions", b"[" * 50_000, 400, "nested too deep"),
    ("completions", b'{"prompt": "\\ud800"}', 400, "half of a surrogate pair"),
    ("completions", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "integer"),
    ("completions", b'{"prompt": "a", "temperature": NaN}', 400, "temperature: expected a number, found NaN"),
    ("completions", {}, 400, "prompt: expected a text"),
    ("completions", b"\xef\xbb\xbf{}", 400, "prompt: expected a text"),
    ("completions", {"prompt": "a", "stop": [1]}, 400, "stop: expected at most 16 texts"),
    ("completions", {"prompt": "a", "stop": {"x": 1}}, 400, "stop: expected at most 16 texts"),
    ("completions", {"prompt": "a", "stop": ["x"] * 17}, 400, "stop: expected at most 16 texts"),
    ("completions", {"prompt": "a", "max_tokens": 10**30}, 400, "there is room for 64 together"),
    ("completions", {"prompt": "a", "n": 10**20}, 400, "n: expected an integer at least 1 and at most 128"),
    ("completions", {"prompt": [2**63]}, 400, "is outside the model's vocabulary"),
    ("completions", {"prompt": {}}, 400, "prompt: expected a text, a list of texts, token ids"),
    ("completions", {"prompt": [1, "a"]}, 400, "prompt: expected a text"),
    ("completions", {"prompt": [True]}, 400, "prompt: expected a text"),
    ("completions", {"prompt": []}, 400, "found 0 prompts"),
    ("completions", {"prompt": ["a"] * 129}, 400, "found 129 prompts"),
    ("completions", {"prompt": [[]]}, 400, "prompt: expected"),
    ("completions", {"prompt": [3, 280]}, 400, "token 280 is outside the model's vocabulary of 280"),
    ("completions", {"prompt": [-1]}, 400, "token -1 is outside"),
    ("completions", {"prompt": "a", "temprature": 1}, 400, "temprature: unknown key; did you mean temperature?"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature: must be at least 0"),
    ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p: must be above 0 and at most 1"),
    ("completions", {"prompt": "a", "top_p": 1.5}, 400, "top_p: must be above 0 and at most 1"),
    ("completions", {"prompt": "a", "seed": -1}, 400, "seed: must be between 0 and 2^40"),
    ("completions", {"prompt": "a", "n": 0}, 400, "n: expected an integer at least 1"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens: expected an integer at least 1"),
    ("completions", {"prompt": "a", "max_tokens": 64}, 400, "are 65; there is room for 64 together"),
    ("completions", {"prompt": "fox " * 2000}, 400, "there is room for 64 together"),
    ("completions", {"prompt": "a", "stop": ["", "b"]}, 400, "stop: expected at most 16 texts, none of them empty"),
    ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs: expected"),
    ("completions", {"prompt": "a", "echo": True}, 400, "echo = true: not supported here"),
    ("completions", {"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty = 0.5: not supported"),
    ("completions", {"prompt": "a", "stream_options": {"x": 1}}, 400, "stream_options.x: unknown key"),
    ("completions", {"prompt": "a", "model": "gpt\n"}, 404, "its name is 'tiny'"),
    ("chat/completions", {"messages": []}, 400, "messages: expected a list with 1 or more"),
    ("chat/completions", {"messages": [3]}, 400, "messages.0: expected a mapping"),
    ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "the content of turn 1 is int, not text"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "turn 1 has a part of type 'image_url', and only text is read",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
        400,
        "needs logprobs: true",
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": "fox" * 300}]}, 400, "there is room for 64"),
    ("chat/completions", {"prompt": "a"}, 400, "messages: missing"),
    ("completions", b'{"prompt": "' + b"a" * 70_000 + b'"}', 413, "the body is larger than 65536 bytes"),
    ("nothing", {}, 404, "POST /v1/nothing: Not Found"),
]


def test_malformed_requests_get_a_sentence_and_leave_nothing_behind(caplog):
    server = make_server(MODEL, OWN, limits=Limits(body=65536))

    async def use(client):
        found = [await post(client, path, body) for path, body, _, _ in BAD]
        async with client.get("/v1/completions") as response:
            found.append((response.status, await response.json()))
        return found, await post(client, "completions", {"prompt": "the", "max_tokens": 2})

    found, after = talk(server, use)
    for (status, answer), (_, body, code, message) in zip(
        found, [*BAD, ("", {}, 405, "Method Not Allowed")], strict=True
    ):
        assert status == code and message in answer["error"]["message"], (body, status, answer)
        assert answer["error"]["type"] == "invalid_request_error"
    assert after[0] == 200 and server.counts.refused == len(BAD) + 1
    assert not engine_of(server).busy and server.answering == 0 and not caplog.records


def test_a_key_is_asked_for():
    async def use(client):
        body = {"prompt": "a", "max_tokens": 1}
        headers = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer secret"})
        found = [(await post(client, "completions", body, headers=one))[0] for one in headers]
        async with client.get("/health") as health, client.get("/metrics") as metrics:
            return [*found, health.status, metrics.status]

    assert talk(make_server(MODEL, OWN, key="secret"), use) == [401, 401, 200, 200, 401]


def test_models_health_and_metrics():
    server = make_server(MODEL, OWN)

    async def use(client):
        await post(
            client, "completions", {"prompt": "the quick brown fox jumps over", "max_tokens": 3, "ignore_eos": True}
        )
        await idle(server)
        async with (
            client.get("/v1/models") as models,
            client.get("/health") as health,
            client.get("/metrics") as metrics,
        ):
            return await models.json(), await health.json(), await metrics.text()

    models, health, metrics = talk(server, use)
    assert [one["id"] for one in models["data"]] == ["tiny"] and models["data"][0]["max_model_len"] == 64
    assert health == {"status": "ok"}
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(lines["llmtrain_generation_tokens_total"]) == 3 and float(lines["llmtrain_requests_running"]) == 0
    assert float(lines['llmtrain_first_token_seconds_bucket{le="+Inf"}']) == 1
    assert float(lines['llmtrain_requests_total{end="length"}']) == 1
    assert len({line.split()[2] for line in metrics.splitlines() if line.startswith("# TYPE")}) == 11


def test_a_model_without_a_template_refuses_chats_alone():
    server = make_server(MODEL, OWN, template=None, no_template="there is no template")
    body = {"messages": [{"role": "user", "content": "a"}]}
    status, found = talk(server, lambda client: post(client, "chat/completions", body))
    assert status == 400 and found["error"]["message"] == "there is no template"


async def idle(server) -> None:
    for _ in range(5000):
        if not engine_of(server).busy and not server.answering:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("a slot was lost")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row(stream):
    server = make_server(MODEL, OWN, engine={"rows": 1, "max_len": 4096, "deterministic": True})
    long = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": stream}

    async def use(client):
        asked = asyncio.create_task(post(client, "completions", long))
        while not engine_of(server).live:
            await asyncio.sleep(0.01)
        asked.cancel()
        await idle(server)
        return await post(client, "completions", {"prompt": "a", "max_tokens": 2})

    assert talk(server, use)[0] == 200
    assert server.counts.ended["cancelled"] == 1 and len(engine_of(server).live) == 0


def test_too_many_requests_are_refused_and_waiting_has_an_end():
    options = {"engine": {"rows": 1, "max_len": 4096}, "limits": Limits(waiting=1, wait_seconds=1.0)}
    server = make_server(MODEL, OWN, **options)
    long = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}

    async def use(client):
        running = asyncio.create_task(post(client, "completions", long))
        while not engine_of(server).live:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(post(client, "completions", {"prompt": "a"}))
        while not server.worker.state.waiting:
            await asyncio.sleep(0.01)
        refused = await post(client, "completions", {"prompt": "b"})
        never = await post(client, "completions", {"prompt": "b", "n": 3})
        late = await waiting
        running.cancel()
        await idle(server)
        return refused, never, late

    refused, never, late = talk(server, use)
    assert refused[0] == 429 and refused[1]["error"]["message"] == "1 requests are waiting; try again later"
    assert never[0] == 400 and "3 answers asked for; at most 2 can wait" in never[1]["error"]["message"]
    assert late[0] == 503 and "no token came within 1 s" in late[1]["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_fails_ends_answers_with_an_error(stream, monkeypatch, caplog):
    server = make_server(MODEL, OWN)
    step, begun = Engine.step, threading.Event()

    def failing(engine: Engine) -> None:
        step(engine)
        if engine.tokens_drawn > 3 and (not stream or begun.wait(100)):
            raise RuntimeError("out of memory")

    monkeypatch.setattr(Engine, "step", failing)

    async def use(client):
        body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "stream": stream, "logprobs": 0}
        async with client.post("/v1/completions", json=body) as response:
            begun.set()
            status, text = response.status, await response.text()
        async with client.get("/health") as health:
            return status, text, health.status, await post(client, "completions", {"prompt": "a"})

    status, text, health, after = talk(server, use)
    assert status == (200 if stream else 503) and "the engine failed or was ended" in text and "[DONE]" not in text
    assert health == 503 and after[0] == 503
    assert [record.message for record in caplog.records] == [
        "the engine failed; this server answers no further requests"
    ]


def test_draining_ends_what_runs_and_refuses_what_comes():
    server = make_server(MODEL, OWN)

    async def use() -> Any:
        async with served(server) as client:
            body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}
            running = asyncio.create_task(post(client, "completions", body))
            while not server.answering:
                await asyncio.sleep(0.005)
            ending = asyncio.create_task(server.drain())
            await asyncio.sleep(0)
            refused = await post(client, "completions", body)
            await ending
            return await running, refused

    (status, found), refused = asyncio.run(use())
    assert status == 200 and found["usage"]["completion_tokens"] == 50
    assert refused[0] == 503 and refused[1]["error"]["message"] == "the server is ending"
