"""The web application: OpenAI's routes over an engine (aiohttp, which `datasets` brings: no further dependency)."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from llmtrain.data.chat.conversation import ChatFault, read_message
from llmtrain.data.chat.template import ChatError, ChatPrompts, ChatTemplate
from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.errors import RunError, UserError
from llmtrain.generate.request import Request, check
from llmtrain.logs import log
from llmtrain.serve.answering import MakeAnswering
from llmtrain.serve.answers import Answer, ChatForm, CompletionForm, Form, Piece, merged, usage
from llmtrain.serve.metrics import Counts, exposition
from llmtrain.serve.protocol import Body, ChatBody, CompletionBody, read_body

OPENAI_MAX_TOKENS = 16
"""New tokens of a completion whose body names no number, as OpenAI's API has it."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RefusedError(UserError):
    """A request that is not answered. http_status: of the response."""

    def __init__(self, http_status: int, message: str):
        super().__init__(message)
        self.http_status = http_status


@dataclass(frozen=True)
class Limits:
    """Bounds of a server. body: bytes of one. waiting: requests beyond the engine's rows. wait_seconds: until the first token."""

    body: int = 4 << 20
    waiting: int = 256
    wait_seconds: float = 300.0


class Server:
    """A model behind OpenAI's API. Call `start` inside the event loop, and `stop` at the end.

    name: of the model in responses. key: what `Authorization: Bearer` must hold, if anything. template: of chats; None refuses
    them with `no_template`, a sentence.
    """

    def __init__(
        self,
        engine: MakeAnswering,
        tokenizer: TextTokenizer,
        name: str,
        *,
        template: ChatTemplate | None = None,
        no_template: str = "",
        key: str | None = None,
        limits: Limits = Limits(),
    ):
        self.tokenizer, self.name, self.no_template = tokenizer, name, no_template
        self.prompts = None if template is None else ChatPrompts(tokenizer, template)
        self.key, self.limits, self.counts, self.created = key, limits, Counts(), int(time.time())
        self.worker = engine(self._failed, self._send)
        self.answering = self.requests = 0  # bodies, and requests of theirs
        self.draining = False
        self._put: dict[Request, Callable[[], None]] = {}  # what ends an answer with an error
        self._made: list[tuple[asyncio.Queue[Piece], Piece]] = []  # in the engine's thread, in its present step
        self.app = web.Application(client_max_size=limits.body, middlewares=[self._errors, self._authorize])
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
            ]
        )

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.worker.start()

    def stop(self) -> None:
        self.worker.stop()

    async def drain(self) -> None:
        """Refuse new bodies, and wait until those that are being answered have ended."""
        self.draining = True
        while self.answering:
            await asyncio.sleep(0.02)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return self._refusal(413, f"the body is larger than {self.limits.body} bytes")
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return self._refusal(error.status, f"{request.method} {request.path}: {error.reason}")
        except RefusedError as error:
            return self._refusal(error.http_status, str(error))
        except UserError as error:
            return self._refusal(400, str(error))
        except RunError as error:
            return self._refusal(503, str(error))
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception as error:
            log.exception("a request failed")
            return self._refusal(500, f"an error of the server: {type(error).__name__}")

    def _refusal(self, status: int, message: str) -> web.Response:
        self.counts.refused += status < 500
        kind = "server_error" if status >= 500 else "invalid_request_error"
        headers = {"Retry-After": "1"} if status in (429, 503) else {}
        return web.json_response(
            {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status, headers=headers
        )

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.key is not None and request.path != "/health":
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.key.encode()):
                return self._refusal(401, "the key is missing or wrong: send `Authorization: Bearer KEY`")
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        if self.worker.failure is not None:
            return self._refusal(503, f"the engine failed: {self.worker.failure}")
        return self._refusal(503, "the server is ending") if self.draining else web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text=exposition(self.worker.state, self.worker.sizes.rows, self.counts),
            headers={"Content-Type": "text/plain; version=0.0.4"},
        )

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "llmtrain"}
        model["max_model_len"] = self.worker.sizes.max_len
        return web.json_response({"object": "list", "data": [model]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body: CompletionBody = self._admit(read_body(CompletionBody, await _content(request)))

        def encoded() -> list[list[int]]:
            return [self.tokenizer.prompt_ids(one) if isinstance(one, str) else one for one in body.prompts]

        prompts = await self.loop.run_in_executor(None, encoded)
        new = body.max_tokens or OPENAI_MAX_TOKENS
        return await self._answer(
            request, body, CompletionForm(self.tokenizer, body.top, body.return_tokens_as_token_ids), prompts, new
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body: ChatBody = self._admit(read_body(ChatBody, await _content(request)))
        prompts, text = self._render(body)  # in this thread, which alone a limit of time can stop
        prompt = await self.loop.run_in_executor(None, prompts.ids, text)
        room = self.worker.sizes.max_len
        new = body.max_completion_tokens or body.max_tokens or room - len(prompt)
        if new < 1:
            raise UserError(f"the conversation has {len(prompt)} tokens; there is room for {room} with the answer")
        return await self._answer(request, body, ChatForm(self.tokenizer, body.top), [prompt], new)

    def _admit(self, body: Any) -> Any:
        """The body, if this server answers it. Raises RefusedError."""
        if body.model not in ("", self.name):
            raise RefusedError(404, f"there is no model {body.model!r} here; its name is {self.name!r}")
        if self.draining:
            raise RunError("the server is ending")
        return body

    def _render(self, body: ChatBody) -> tuple[ChatPrompts, str]:
        """Template and text of a conversation. Raises UserError."""
        if self.prompts is None:
            raise UserError(self.no_template or "the model has no chat template")
        for number, message in enumerate(body.messages, 1):
            if not isinstance(message.get("role"), str):
                raise UserError(f"messages: message {number} has no `role`")
        try:
            messages = [read_message(one, number) for number, one in enumerate(body.messages, 1)]
            return self.prompts, self.prompts.text(messages, body.tools or None)
        except (ChatError, ChatFault) as error:
            raise UserError(f"messages: {error}") from None

    async def _answer(
        self, http: web.Request, body: Body, form: Form, prompts: Sequence[list[int]], new: int
    ) -> web.StreamResponse:
        began = time.perf_counter()
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        requests = self._requests(body, prompts, new, pieces)
        rows = self.worker.sizes.rows
        if len(requests) > self.limits.waiting + rows:
            raise UserError(f"{len(requests)} answers asked for; at most {self.limits.waiting + rows} can wait")
        if self.requests + len(requests) > self.limits.waiting + rows:
            raise RefusedError(429, f"{max(self.requests - rows, 0)} requests are waiting; try again later")
        self.answering += 1
        self.requests += len(requests)
        ends = ["cancelled"] * len(
            requests
        )  # not the requests' own, which the engine sets later than it hands out the last token
        try:
            for request in requests:
                self.worker.submit(request)
            arriving = self._pieces(pieces, began, ends)
            first = await anext(arriving)
            head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}
            if body.stream:
                return await self._stream(http, body, form, head, requests, first, arriving)
            return await self._whole(form, head, requests, first, arriving)
        finally:
            self.answering -= 1
            self.requests -= len(requests)
            for request, end in zip(requests, ends, strict=True):
                self.worker.cancel(request)
                self._put.pop(request, None)
                self.counts.ended[end] += 1
            self.counts.whole.add(time.perf_counter() - began)

    def _requests(
        self, body: Body, prompts: Sequence[list[int]], new: int, pieces: asyncio.Queue[Piece]
    ) -> list[Request]:
        """Requests of a body, those of one prompt one behind the other. Raises UserError before any is submitted."""
        seed, sizes = secrets.randbelow(2**40), self.worker.sizes  # the seed where the body has none
        ends = frozenset() if body.ignore_eos else frozenset(self.tokenizer.end_ids)
        found = []

        def put(piece: Piece) -> None:
            self._made.append((pieces, piece))

        for prompt in prompts:
            for number in range(body.n):
                answer = Answer(len(found), self.tokenizer, prompt, body.stops, put)
                sampling = body.sampling(seed)
                request = Request(prompt, new, sampling, ends, body.top or 0, answer.take, number)
                check(request, sizes.vocab_size, sizes.max_len)
                found.append(request)
        for choice, request in enumerate(found):
            self._put[request] = partial(put, Piece(choice, "", end="error"))
        return found

    def _send(self) -> None:
        """Hand a step's pieces to the event loop at once: each hand-over wakes it, and takes longer than a token."""
        made, self._made = self._made, []
        if made and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_deliver, made)

    def _failed(self, request: Request) -> None:
        if put := self._put.get(request):
            put()

    async def _pieces(self, pieces: asyncio.Queue[Piece], began: float, ends: list[str]) -> AsyncIterator[Piece]:
        """Pieces of all choices until each has ended. ends: takes the choices' ends. Raises RunError where the first takes too
        long, or the engine fails."""
        try:
            came = [await asyncio.wait_for(pieces.get(), self.limits.wait_seconds)]
        except TimeoutError:
            raise RunError(f"no token came within {self.limits.wait_seconds:g} s; too many requests wait") from None
        self.counts.first_token.add(time.perf_counter() - began)
        left = len(ends)
        while True:
            while not pieces.empty():
                came.append(pieces.get_nowait())
            for piece in merged(came):
                if piece.end is not None:
                    ends[piece.choice] = piece.end
                    left -= 1
                if piece.end == "error":
                    raise RunError("the engine failed or was ended before the answer was complete")
                yield piece
            if not left:
                return
            came = [await pieces.get()]

    async def _whole(
        self, form: Form, head: dict[str, Any], requests: Sequence[Request], first: Piece, rest: AsyncIterator[Piece]
    ) -> web.Response:
        found = [first, *[piece async for piece in rest]]
        choices = []
        for number in range(len(requests)):
            own = [piece for piece in found if piece.choice == number]
            tokens = [token for piece in own for token in piece.tokens]
            choices.append(form.choice(number, "".join(piece.text for piece in own), tokens, own[-1].end))
        return web.json_response(head | {"object": form.object, "choices": choices, "usage": usage(requests)})

    async def _stream(
        self,
        http: web.Request,
        body: Body,
        form: Form,
        head: dict[str, Any],
        requests: Sequence[Request],
        first: Piece,
        rest: AsyncIterator[Piece],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        head = head | {"object": form.chunk_object}

        async def send(data: dict[str, Any] | str) -> None:
            text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
            await response.write(f"data: {text}\n\n".encode())

        offsets = [0] * len(requests)
        opened: set[int] = set()

        async def chunk(piece: Piece) -> None:
            if piece.choice not in opened and (opening := form.opening(piece.choice)):
                await send(head | {"choices": [opening]})
            opened.add(piece.choice)
            made = form.chunk(piece.choice, piece.text, piece.tokens, piece.end, offsets[piece.choice])
            offsets[piece.choice] += len(piece.text)
            await send(head | {"choices": [made]})

        with contextlib.suppress(ConnectionResetError):  # the client has gone away
            await response.prepare(http)
            try:
                await chunk(first)
                async for piece in rest:
                    await chunk(piece)
            except RunError as error:
                await send({"error": {"message": str(error), "type": "server_error", "param": None, "code": 503}})
            else:
                if body.stream_options.include_usage:
                    await send(head | {"choices": [], "usage": usage(requests)})
                await send("[DONE]")
            await response.write_eof()
        return response


async def _content(request: web.Request) -> bytes:
    """The body as it was sent (the runner decompresses none). Raises RefusedError for a compressed one."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise RefusedError(415, f"Content-Encoding: {encoding} is not read here; send the body uncompressed")
    return await request.read()


def _deliver(made: Sequence[tuple[asyncio.Queue[Piece], Piece]]) -> None:
    for pieces, piece in made:
        pieces.put_nowait(piece)
