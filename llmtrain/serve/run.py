"""The process of a server: it listens until SIGTERM or Ctrl-C, ends what runs, and leaves."""

import asyncio
import contextlib
import logging
import signal
import socket

from aiohttp import web
from aiohttp.http import HttpProcessingError

from llmtrain.errors import INTERRUPTED, UserError
from llmtrain.logs import log
from llmtrain.serve.app import Server

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 1024
"""Connections that the system accepts before this process does."""


def listen(host: str, port: int) -> socket.socket:
    """A socket of this address, whose connections wait until the server is there. port: 0 takes a free one. Raises UserError for an
    address that cannot be listened on."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"cannot listen on {host}:{port}: {error}") from None


def serve(server: Server, listening: socket.socket, drain_seconds: float) -> int:
    """Answer until a signal, of which SIGNALS may be blocked before. The first lets answers end, for up to drain_seconds; a second
    ends them. Returns the exit status."""
    return asyncio.run(_serve(server, listening, drain_seconds))


def _is_of_the_server(record: logging.LogRecord) -> bool:
    """False for what a client sent that is no HTTP, which got status 400 with the reason."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _serve(server: Server, listening: socket.socket, drain_seconds: float) -> int:
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    logging.getLogger("aiohttp.server").addFilter(_is_of_the_server)
    # A client that goes away cancels its handler, and so its request.
    runner = web.AppRunner(
        server.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, auto_decompress=False
    )
    await runner.setup()
    await web.SockSite(runner, listening).start()
    server.start()
    try:
        at = ", ".join(f"{name}:{found}" for name, found, *_ in runner.addresses)
        log.info(f"{server.name} at http://{at}/v1; {server.worker.sizes.rows} requests at a time")
        first = await signals.get()
        log.info(f"{signal.Signals(first).name}: ending; {server.answering} bodies are being answered")
        ending = asyncio.create_task(server.drain())
        again = asyncio.create_task(signals.get())
        await asyncio.wait({ending, again}, timeout=drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in (ending, again):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    finally:
        await asyncio.to_thread(server.stop)  # answers that are left get an error
        await asyncio.sleep(0)
        await runner.cleanup()
    return INTERRUPTED if first == signal.SIGINT else 0
