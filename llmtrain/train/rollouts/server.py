"""Answers by servers of OpenAI's completions API that hold the same weights: vLLM's, `llmtrain serve`."""

import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llmtrain.config.regular_file import parse_json
from llmtrain.errors import RunError, UserError, without_credentials
from llmtrain.objectives.policy.sections import PolicySection, ServerRollout
from llmtrain.train.rollouts.answers import Answer
from llmtrain.train.rollouts.engine import draw_seed

_ATTEMPTS, _PAUSE_SECONDS = 4, 2.0
"""Of requests that a server cannot be reached with, or fails at (5xx); the pause doubles."""
_TOKEN = "token_id:"
"""Beginning of a token's name where a server gives ids in place of texts (vLLM's return_tokens_as_token_ids)."""


class ServerSource:
    """Draws answers by a server. An answer's seed depends on the run's seed, its step, its sample and its number in the group."""

    gathers = False
    """See EngineSource."""

    def __init__(self, section: PolicySection, ends: Collection[int], seed: int):
        """Raises UserError where the variable of the server's key is not set."""
        rollout = section.rollout
        assert isinstance(rollout, ServerRollout)
        self.section, self.server, self.ends, self.seed = section, rollout, sorted(ends), seed
        self.headers = {"Content-Type": "application/json"}
        if rollout.key_variable is not None:
            if not (key := os.environ.get(rollout.key_variable)):
                raise UserError(f"objective.rollout.key_variable: the environment has no {rollout.key_variable}")
            self.headers["Authorization"] = f"Bearer {key}"

    def draw(self, groups: Sequence[list[Answer]]) -> None:
        """Fill in the answers to the prompts of some groups. Raises RunError where the server cannot be reached, or answers
        something else."""
        answers = [(answer, number) for group in groups for number, answer in enumerate(group)]
        with ThreadPoolExecutor(self.server.concurrency) as pool:
            for _ in pool.map(lambda one: self._draw(*one), answers):
                pass

    def _draw(self, answer: Answer, number: int) -> None:
        found = self._ask(
            {
                "model": self.server.model,
                "prompt": answer.prompt,
                "max_tokens": self.section.max_new_tokens,
                "temperature": self.section.temperature,
                "seed": (draw_seed(self.seed, answer) + number) % 2**31,
                "logprobs": 0,
                "return_tokens_as_token_ids": True,
            }
        )
        try:
            [choice] = found["choices"]
            found = zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True)
            tokens = [(int(name.removeprefix(_TOKEN)), math.nan if p is None else float(p)) for name, p in found]
            answer.over_long = {"stop": False, "length": True}[choice["finish_reason"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(
                f"{self.server.url} answers no log-probabilities of token ids ({type(error).__name__}: {str(error)[:80]}); the "
                "server needs vLLM's return_tokens_as_token_ids, which `llmtrain serve` has too"
            ) from None
        answer.ids, answer.log_p = [one for one, _ in tokens], [p for _, p in tokens]
        if not answer.over_long and (not answer.ids or answer.ids[-1] not in self.ends):  # some servers leave it out
            answer.ids.append(self.ends[0])
            answer.log_p.append(math.nan)

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.server.url.rstrip('/')}/completions", json.dumps(body).encode(), self.headers
        )
        for attempt in range(_ATTEMPTS):
            try:
                with urllib.request.urlopen(request, timeout=self.server.seconds) as response:
                    return parse_json(response.read())
            except urllib.error.HTTPError as error:
                reason = f"{error.code}: {error.read(300).decode(errors='replace')}"
                if error.code < 500 and error.code != 429:
                    raise RunError(f"{self.server.url} refuses a prompt: {without_credentials(reason)}") from None
            except (OSError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
            if attempt + 1 < _ATTEMPTS:
                time.sleep(_PAUSE_SECONDS * 2**attempt)
        raise RunError(
            f"{self.server.url} gives no answer: {without_credentials(reason)}. Start it, and start again: the run goes on from "
            "its last checkpoint"
        )
