"""Answers by a server of OpenAI's completions API: what is asked, what is read, and servers that fail."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from llmtrain.errors import RunError, UserError
from llmtrain.objectives.policy.sections import PolicySection
from llmtrain.train.rollouts import server
from llmtrain.train.rollouts.answers import Answer

EOD = 0
Reply = Callable[[dict[str, Any]], tuple[int, Any]]


class Stub(ThreadingHTTPServer):
    """A server that answers by `reply`, and keeps what it was asked."""

    reply: Reply

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        status, content = self.server.reply(body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(server, "_PAUSE_SECONDS", 0.0)
    with Stub() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def source(url: str, **rollout: Any) -> server.ServerSource:
    settings = {"type": "policy", "rewards": ["exact"], "group_size": 2, "max_new_tokens": 3}
    rollout = {"type": "openai", "url": url, "concurrency": 4} | rollout
    return server.ServerSource(PolicySection.model_validate(settings | {"rollout": rollout}), [EOD], seed=1)


def groups(count: int = 2) -> list[list[Answer]]:
    return [[Answer(sample, 0, [5, 6 + sample]) for _ in range(2)] for sample in range(count)]


def choice(ids: list[int], end: str = "stop", values: list[float | None] | None = None) -> dict[str, Any]:
    tokens = [f"token_id:{one}" for one in ids]
    logprobs = {"tokens": tokens, "token_logprobs": values or [-0.5] * len(ids)}
    return {"choices": [{"text": "", "logprobs": logprobs, "finish_reason": end}]}


def test_answers_have_the_tokens_and_log_probabilities_of_the_server(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEY_OF_A_SERVER", "k1")
    stub.reply = lambda body: (200, choice([7, body["prompt"][1], 9], "length"))
    made = groups()
    source(f"http://127.0.0.1:{stub.server_port}/v1/", key_variable="KEY_OF_A_SERVER").draw(made)
    assert [one.ids for group in made for one in group] == [[7, 6, 9], [7, 6, 9], [7, 7, 9], [7, 7, 9]]
    assert all(one.log_p == [-0.5] * 3 and one.over_long for group in made for one in group)
    paths, bodies, keys = zip(*stub.asked, strict=True)
    assert set(paths) == {"/v1/completions"} and set(keys) == {"Bearer k1"}
    assert len({body["seed"] for body in bodies}) == 4
    assert all(body["max_tokens"] == 3 and body["return_tokens_as_token_ids"] for body in bodies)


@pytest.mark.parametrize("ids", [[7, EOD], [7]])
def test_an_answer_that_ends_has_the_token_that_ends_it(ids: list[int], stub: Stub):
    stub.reply = lambda body: (200, choice(ids, values=[-0.5, None][: len(ids)]))
    made = groups(1)
    source(f"http://127.0.0.1:{stub.server_port}/v1").draw(made)
    assert made[0][0].ids == [7, EOD] and not made[0][0].over_long
    assert made[0][0].log_p[0] == -0.5 and math.isnan(made[0][0].log_p[1])


def test_a_server_that_fails_at_first_is_asked_again(stub: Stub):
    seen: list[int] = []

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        seen.append(1)
        return (503, {}) if len(seen) == 1 else (200, choice([7, EOD]))

    stub.reply = reply
    source(f"http://127.0.0.1:{stub.server_port}/v1", concurrency=1).draw(groups(1))
    assert len(stub.asked) == 3


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (400, {"error": "the prompt is too long"}, "refuses a prompt: 400: .*too long"),
        (500, {}, "gives no answer: 500"),
        (200, b"<html>", "gives no answer: JSONDecodeError"),
        (200, {"choices": [{"text": "7", "logprobs": None, "finish_reason": "stop"}]}, "answers no log-probabilities"),
        (200, {"choices": []}, "answers no log-probabilities"),
        (200, [], "answers no log-probabilities"),
        (200, choice([7, 8], "abort"), "answers no log-probabilities .*abort"),
        (200, {"choices": [{"logprobs": {"tokens": [" 7", "no"], "token_logprobs": [0, 0]}}]}, "needs vLLM's return_"),
    ],
)
def test_servers_that_fail_end_the_run_with_a_sentence(status: int, content: Any, message: str, stub: Stub):
    stub.reply = lambda body: (status, content)
    with pytest.raises(RunError, match=message):
        source(f"http://127.0.0.1:{stub.server_port}/v1").draw(groups(1))


def test_a_server_that_is_not_there(stub: Stub):
    with pytest.raises(RunError, match=r"gives no answer: URLError.*last checkpoint"):
        source("http://127.0.0.1:9/v1").draw(groups(1))
    with pytest.raises(UserError, match="the environment has no KEY_THAT_IS_NOT_SET"):
        source("http://127.0.0.1:9/v1", key_variable="KEY_THAT_IS_NOT_SET")
