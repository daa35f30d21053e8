"""Load on a server of OpenAI's API: requests that arrive as `vllm bench serve` sends them, and when their tokens came."""

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

CONNECT_SECONDS = 30.0


@dataclass(frozen=True)
class Case:
    """One measurement. prompt, answer: lengths in tokens, each drawn evenly from length * (1 - spread) to length * (1 + spread).
    rate: requests per second, inf for all at once. burstiness: shape of the gamma distribution of gaps between them, 1 for a
    Poisson process. users: requests that may be under way at a time; None: any number."""

    prompt: int
    answer: int
    requests: int
    rate: float = math.inf
    users: int | None = None
    spread: float = 0.0
    burstiness: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Target:
    """A server. url: up to /v1. ids: prompts are token ids below it; None: words of text."""

    url: str
    model: str
    key: str | None = None
    ids: int | None = 1000

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}


@dataclass
class Timing:
    """Times of one answer in seconds, from the moment at which it was sent. gaps: between its chunks. tokens: as the server counts
    them, or else its chunks. error: why there is no answer."""

    first: float = 0.0
    whole: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """TPOT: time per token after the first; None of a single token."""
        return (self.whole - self.first) / (self.tokens - 1) if self.tokens > 1 else None


def bodies(case: Case, target: Target) -> list[dict[str, Any]]:
    """Bodies of a case's requests, the same for the same seed."""
    rng = random.Random(case.seed)

    def length(mean: int) -> int:
        return max(1, rng.randint(math.ceil(mean * (1 - case.spread)), math.floor(mean * (1 + case.spread))))

    found = []
    for _ in range(case.requests):
        count = length(case.prompt)
        prompt: Any = [rng.randrange(target.ids or 1000) for _ in range(count)]
        if target.ids is None:
            prompt = " ".join(f"{one:03}" for one in prompt)
        found.append(
            {
                "model": target.model,
                "prompt": prompt,
                "max_tokens": length(case.answer),
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
    return found


def arrivals(case: Case) -> list[float]:
    """Seconds from the beginning at which requests are sent."""
    if math.isinf(case.rate):
        return [0.0] * case.requests
    rng, now, found = random.Random(case.seed + 1), 0.0, []
    for _ in range(case.requests):
        found.append(now)
        now += rng.gammavariate(case.burstiness, 1 / (case.rate * case.burstiness))
    return found


async def answer(client: aiohttp.ClientSession, target: Target, body: dict[str, Any]) -> Timing:
    """Send a request and time its stream."""
    timing, sent = Timing(), time.perf_counter()
    last, chunks = sent, 0
    try:
        async with client.post(f"{target.url}/completions", json=body, headers=target.headers) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                return Timing(error=f"status {response.status}: {text}")
            async for line in response.content:
                text = line.decode().strip().removeprefix("data:").strip()
                if not text or text == "[DONE]":
                    continue
                data, now = json.loads(text), time.perf_counter()
                if "error" in data:
                    return Timing(error=str(data["error"])[:200])
                if data.get("choices"):
                    chunks += 1
                    if chunks == 1:
                        timing.first = now - sent
                    else:
                        timing.gaps.append(now - last)
                    last, timing.whole = now, now - sent
                if counted := data.get("usage"):
                    timing.prompt_tokens, timing.tokens = counted["prompt_tokens"], counted["completion_tokens"]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        return Timing(error=f"{type(error).__name__}: {error}"[:200])
    if not chunks:
        return Timing(error="the stream has no tokens")
    timing.tokens = timing.tokens or chunks
    return timing


async def load(case: Case, target: Target, seconds: float) -> tuple[list[Timing], float]:
    """(times of all requests, seconds from the first one's sending to the last one's end). seconds: limit of one request."""
    free = asyncio.Semaphore(case.users or case.requests)
    sent: Sequence[dict[str, Any]] = bodies(case, target)
    limits = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
    async with aiohttp.ClientSession(
        timeout=limits, connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 20
    ) as client:
        began = time.perf_counter()

        async def one(body: dict[str, Any], at: float) -> Timing:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            async with free:
                return await answer(client, target, body)

        timings = await asyncio.gather(*map(one, sent, arrivals(case)))
        return list(timings), time.perf_counter() - began


async def model_name(url: str, key: str | None) -> str:
    """Name of the first model that a server lists."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as client, client.get(f"{url}/models", headers=headers) as found:
        found.raise_for_status()
        return str((await found.json())["data"][0]["id"])
