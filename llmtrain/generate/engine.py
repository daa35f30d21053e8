"""Generation for requests that come and go: continuous batching (Yu et al., Orca, OSDI 2022) of prompts of any length.

A step reads some of the prompts that wait and one token of every request that is being answered. Prompts shorter than a piece are
read together, padded; others alone, in pieces whose borders depend on the prompt alone. Tokens of all rows are read in one pass.
What a request can see of the others is rounding; with `deterministic` each row has passes of its own, and sees nothing.

On a GPU the tokens drawn in a step are read on at once, before the host has seen them, so that the GPU does not wait for the host.
A row that has ended meanwhile is dropped, and what was read of it with it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.errors import UserError
from llmtrain.generate.decoding import prefill
from llmtrain.generate.options import Sampling
from llmtrain.generate.pages import PagedSlots
from llmtrain.generate.prefixes import PrefixCache
from llmtrain.generate.prompt_passes import TOKENS, PromptPasses
from llmtrain.generate.request import Request, Token, check
from llmtrain.generate.sampling import Draws, on_device, sample
from llmtrain.generate.slots import SeparateSlots, SharedSlots, Slots, filled
from llmtrain.models.cache import Cache
from llmtrain.models.causal_lm import CausalLM

PIECE, TOGETHER = {"cpu": 512, "cuda": 2048}, {"cpu": 512, "cuda": 8192}
"""Tokens of a prompt in one pass, and of short prompts in one, padding included. Fewer take a GPU no less time: a pass is hundreds
of launches, which take the host about 25 ms (1B, H100)."""
PROMPTS_TOGETHER = 16
"""Short prompts in one pass: so many rows of memory are taken for it."""


@dataclass(eq=False)
class _Active:
    request: Request
    draws: Draws
    read: int = 0  # tokens of the prompt


class Engine:
    """Answers requests with a model in eval mode. Not thread-safe, but for `Request.cancelled`.

    rows: requests that are answered at a time; others wait in order. max_len: tokens of a prompt and its answer together, at most.
    piece: tokens of a prompt read in one pass; default PIECE. prompt_tokens: about the number of prompt tokens per step while
    others are being answered; default what one pass reads. prefix_bytes: memory for beginnings of prompts, 0 for none. Keys, values
    and states take rows * max_len slots of memory from the start (`nbytes`), so that what was admitted fits; short prompts that are
    read together take up to PROMPTS_TOGETHER rows of TOGETHER (or a piece of) slots in all beside them. key_bytes: keys and values
    take these instead, in pages, each request as many as it can need: rows may be many more (generate/pages.py).
    ahead: read tokens on before the host has seen them; default on a GPU. Raises UserError when the model's learned positions end
    before max_len.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        rows: int = 16,
        max_len: int = 2048,
        piece: int | None = None,
        prompt_tokens: int | None = None,
        prefix_bytes: int = 0,
        key_bytes: int | None = None,
        deterministic: bool = False,
        ahead: bool | None = None,
    ):
        kind = "cuda" if model.device.type == "cuda" else "cpu"
        self.model, self.rows, self.max_len, self.piece = model, rows, max_len, piece or PIECE[kind]
        self.together = max(self.piece, TOGETHER[kind])
        self.prompt_tokens = prompt_tokens or (self.together if kind == "cuda" else self.piece)
        self.deterministic = deterministic
        self.ahead = not deterministic and (model.device.type == "cuda" if ahead is None else ahead)
        if key_bytes is None:
            self.slots: Slots = (SeparateSlots if deterministic else SharedSlots)(model, rows, max_len)
        elif deterministic:
            raise UserError(
                "keys in pages are read in passes of all requests; with deterministic, leave their memory out"
            )
        else:
            self.slots = PagedSlots(model, rows, max_len, key_bytes)
        self.passes: PromptPasses | None = None
        """Of prompts shorter than a piece, once there are some (`prepare`)."""
        self.prefixes = PrefixCache(prefix_bytes, self.piece) if prefix_bytes else None
        self.waiting: deque[Request] = deque()
        self.live: list[_Active] = []
        self._reading: tuple[_Active, Cache] | None = None
        self._held: tuple[dict[tuple[int, ...], int], Tensor, Cache] | None = None
        """Rows of prompts that a cache still holds, with the logits after each: the requests of a group have theirs in common."""
        self._pending: tuple[dict[_Active, int], Tensor] | None = None
        """Rows whose last tokens were read ahead, with their places in the logits after them."""
        self.prompt_tokens_read = self.tokens_drawn = 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states, those of prefixes included."""
        passes = self.passes.cache.nbytes if self.passes else 0
        return self.slots.nbytes + passes + (self.prefixes.nbytes if self.prefixes else 0)

    @property
    def busy(self) -> bool:
        return bool(self.live or self.waiting or self._reading)

    def submit(self, request: Request) -> Request:
        """Add a request behind those that wait. Raises UserError for one that cannot be answered."""
        check(request, self.model.config.vocab_size, self.max_len)
        self.waiting.append(request)
        return request

    def run(self, requests: Iterable[Request]) -> list[Request]:
        """Answer these, and whatever else waits, to the end. Raises what a request's `take` raised."""
        made = [self.submit(request) for request in requests]
        while self.busy:
            self.step()
        for request in made:
            if request.error is not None:
                raise request.error
        return made

    def step(self) -> None:
        """Read a piece of the prompts that wait, and draw a token for each request that is being answered."""
        self._drop_cancelled()
        self._read_prompts()
        if self.live:
            places, logits = self._next_logits()
            rows = [self.live[at] for at in places]
            whole = len(rows) == len(self.live)
            ahead = whole and any(len(row.request.tokens) + 1 < row.request.max_new_tokens for row in rows)
            ended = self._draw(rows, logits, self.ahead and ahead)
            self._leave([places[one] for one in ended])

    def _next_logits(self) -> tuple[list[int], Tensor]:
        """Numbers of the rows that draw in this step, all of them or those that were read ahead, and the logits of each."""
        pending, self._pending = self._pending, None
        if pending is not None:
            before, logits = pending
            places = [at for at, row in enumerate(self.live) if row in before]
            of = [before[self.live[at]] for at in places]
            if of:
                return places, logits if of == list(range(len(before))) else logits[on_device(of, logits.device)]
        tokens = [active.request.tokens[-1].id for active in self.live]
        return list(range(len(tokens))), self.slots.step(tokens)

    def prepare(self) -> None:
        """Compile kernels and record graphs for any number of rows, and of prompts in a pass: seconds on a GPU, for which all
        requests would wait when a number first occurs. Nothing may be under way."""
        assert not self.busy, "requests are under way"
        self.slots.prepare()
        room = self.max_len - 1  # beside the first token
        # Kernels differ for one row and several, padding and none, lengths in sixteens and others, and may for long ones.
        lengths = {min(one, room) for one in (17, 32, 512, self.piece - 1, self.piece)}
        counts = {1, 2, min(PROMPTS_TOGETHER, self.rows)}
        for length, count, padded in itertools.product(sorted(lengths), sorted(counts), (0, 1)):
            sizes = [max(length - padded * at, 1) for at in range(count)]
            prompts = ([at % self.model.config.vocab_size] * size for at, size in enumerate(sizes))
            self.run(Request(prompt, 1, Sampling(temperature=0)) for prompt in prompts)
        if not self.deterministic:
            passes = PromptPasses(self.model, min(self.piece, self.max_len))
            if passes.passes:
                # Smaller passes, for which who is being answered waits less, take no longer once they are recorded.
                self.passes, self.together = passes, min(self.together, TOKENS)
                self.prompt_tokens = min(self.prompt_tokens, TOKENS)
        self.weights_changed()
        self.prompt_tokens_read = self.tokens_drawn = 0

    def weights_changed(self) -> None:
        """Forget what was read with other weights. Nothing may be under way."""
        assert not self.busy, "requests are under way"
        self._held = None
        if self.prefixes is not None:
            self.prefixes.clear()

    def active(self) -> list[_Active]:
        """Requests that are being read or answered."""
        return [*self.live, *([self._reading[0]] if self._reading else [])]

    def _drop_cancelled(self) -> None:
        for request in [request for request in self.waiting if request.cancelled]:
            self.waiting.remove(request)
            request.end = "cancelled"
        if self._reading is not None and self._reading[0].request.cancelled:
            active, cache = self._reading
            self._reading, active.request.end = None, "cancelled"
            self.slots.discard(cache)
        cancelled = [row for row, active in enumerate(self.live) if active.request.cancelled]
        for row in cancelled:
            self.live[row].request.end = "cancelled"
        self._leave(cancelled)

    def _leave(self, rows: Sequence[int]) -> None:
        if rows:
            self.slots.leave(rows)
        for row, last in filled(len(self.live), rows):
            self.live[row] = self.live[last]
        del self.live[len(self.live) - len(rows) :]

    def _read_prompts(self) -> None:
        budget = self.prompt_tokens
        while budget > 0 and (self._reading or self._room()):
            idle = not self.live
            if self._reading is None and self._begin_held():
                continue
            if self._reading is None and not self.deterministic and len(self.waiting[0].prompt) < self.piece:
                read = self._read_short(self.together if idle else min(self.together, budget))
            else:
                read = self._read_piece()
            budget -= 0 if idle else read

    def _room(self) -> int:
        """Number of the waiting requests in front that can be answered beside those that are."""
        waiting = itertools.islice(self.waiting, self.rows - len(self.live))
        totals = [request.tokens_at_most for request in waiting]
        return min(self.slots.room(totals), len(totals)) if totals else 0

    def _begin_held(self) -> bool:
        """Begin the requests in front whose prompts are held. Returns True if there were any."""
        if self._held is None:
            return False
        (rows, logits, cache), taken, room = self._held, list[Request](), self._room()
        while len(taken) < room and tuple(self.waiting[0].prompt) in rows:
            taken.append(self.waiting.popleft())
        if taken:
            active = [_Active(request, self._draws(request), len(request.prompt)) for request in taken]
            self._begin(active, [rows[tuple(request.prompt)] for request in taken], logits, cache)
        return bool(taken)

    def _read_short(self, most: int) -> int:
        """Read prompts of the requests in front together: as many as fit into this many tokens, padding included, and one at least.
        Returns the number of tokens."""
        rows, longest = dict[tuple[int, ...], int](), 0
        for request in itertools.islice(self.waiting, self._room()):
            prompt = tuple(request.prompt)
            wide = max(longest, len(prompt))
            if len(prompt) >= self.piece or (rows and prompt not in rows and wide * (len(rows) + 1) > most):
                break
            rows.setdefault(prompt, len(rows))
            longest = wide
            if len(rows) == PROMPTS_TOGETHER:
                break
        self._held = None
        recorded = self.passes and self.passes.find(len(rows), longest)
        if recorded:
            self._held = rows, recorded(list(rows)), recorded.cache
        else:
            cache = self.slots.reader() if len(rows) == 1 else self.model.empty_cache(len(rows), longest)
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                self._held = rows, prefill(self.model, cache, list(rows)), cache
        self.prompt_tokens_read += sum(map(len, rows))
        self._begin_held()
        return longest * len(rows)

    def _read_piece(self) -> int:
        """Read a piece of a prompt alone. Returns the number of its tokens."""
        if self._reading is None:
            self._reading = self._admit(self.waiting.popleft())
        active, cache = self._reading
        ids = active.request.prompt[active.read : active.read + self.piece]
        logits = self._read(ids, cache)
        active.read += len(ids)
        self.prompt_tokens_read += len(ids)
        if self.prefixes is not None and len(ids) == self.piece:
            self.prefixes.keep(active.request.prompt[: active.read], cache)
        if active.read == len(active.request.prompt):
            self._reading = None
            if not self.deterministic:  # there each row keeps the reader's own memory
                self._held = {tuple(active.request.prompt): 0}, logits, cache
            self._begin([active], [0], logits, cache)
        return len(ids)

    def _begin(self, rows: Sequence[_Active], of: Sequence[int], logits: Tensor, cache: Cache) -> None:
        """Draw the first tokens of requests whose prompts are these rows of a cache."""
        ended = set(self._draw(rows, logits[list(of)]))
        stay = [at for at in range(len(rows)) if at not in ended]
        if stay:
            totals = [rows[at].request.tokens_at_most for at in stay]
            self.slots.join(cache, [of[at] for at in stay], [rows[at].read for at in stay], totals)
            self.live += [rows[at] for at in stay]
        else:
            self.slots.discard(cache)

    def _draws(self, request: Request) -> Draws:
        return Draws(
            request.sampling,
            request.prompt,
            request.number,
            vocab_size=self.model.config.vocab_size,
            draws=request.max_new_tokens,
        )

    def _admit(self, request: Request) -> tuple[_Active, Cache]:
        self._held = None
        active, cache = _Active(request, self._draws(request)), self.slots.reader()
        if self.prefixes is not None:
            active.read = self.prefixes.restore(request.prompt, cache)
        return active, cache

    def _read(self, ids: Sequence[int], cache: Cache) -> Tensor:
        """Logits [1, vocab_size] after some of a prompt's tokens."""
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return self.model.next_logits(torch.tensor([list(ids)], device=self.model.device), cache)

    def _draw(self, rows: Sequence[_Active], logits: Tensor, ahead: bool = False) -> list[int]:
        """Draw a token for each row, and read all on if so. Returns the numbers of the rows that ended."""
        if self.deterministic:
            drawn = [one for at, row in enumerate(rows) for one in _Drawn(logits[at : at + 1], [row]).on_host()]
        else:
            made = _Drawn(logits, rows)
            if ahead:
                self._pending = {row: at for at, row in enumerate(rows)}, self.slots.step(made.tokens)
            drawn = made.on_host()
        ended = []
        for at, (row, (token, likelihood, top)) in enumerate(zip(rows, drawn, strict=True)):
            request = row.request
            row.draws.record(token)
            self.tokens_drawn += 1
            end = None
            if token in request.ends:
                end = "eod"
            elif len(request.tokens) + 1 == request.max_new_tokens:
                end = "length"
            found = Token(token, likelihood, top, end)
            request.tokens.append(found)
            try:
                request.end = "stop" if request.take(found) else end
            except Exception as error:
                request.end, request.error = "cancelled", error
            if request.end:
                ended.append(at)
        return ended


class _Drawn:
    """A token for each row, drawn from logits [n, vocab_size], on its way to the host. tokens: [n], on the device."""

    def __init__(self, logits: Tensor, rows: Sequence[_Active]):
        logits = logits.float()
        self.rows, self.tokens = rows, sample(logits, [row.draws for row in rows])
        likelihoods = logits.log_softmax(dim=-1)
        columns = self.tokens[:, None]
        parts = [columns, likelihoods.gather(1, columns)]
        self.most = min(max(row.request.top for row in rows), logits.shape[1])
        if self.most:
            best = likelihoods.topk(self.most, dim=-1)
            parts += [best.indices, best.values]
        # In one copy, which the host need not wait for yet; fp64 holds ids and likelihoods as they are.
        self.copy = torch.cat([part.double() for part in parts], dim=1).to("cpu", non_blocking=True)
        self.copied = torch.cuda.Event() if logits.is_cuda else None
        if self.copied is not None:
            self.copied.record()

    def on_host(self) -> list[tuple[int, float, tuple[tuple[int, float], ...]]]:
        """(token, its log-likelihood, the likeliest tokens with theirs) of each row."""
        if self.copied is not None:
            self.copied.synchronize()
        found = []
        for row, (token, likelihood, *best) in zip(self.rows, self.copy.tolist(), strict=True):
            top = zip(map(int, best[: self.most]), best[self.most :], strict=True)
            found.append((int(token), likelihood, tuple(top)[: row.request.top]))
        return found
