"""The process of a server: it listens until SIGTERM or Ctrl-C, ends what runs, and leaves."""

import asyncio
import contextlib
import logging
import signal

from aiohttp import web
from aiohttp.http import HttpProcessingError

from llmtrain.errors import INTERRUPTED, UserError
from llmtrain.logs import log
from llmtrain.serve.app import Server


def serve(server: Server, host: str, port: int, drain_seconds: float) -> int:
    """Listen until a signal. The first lets answers end, for up to drain_seconds; a second ends them. Returns the exit status.

    port: 0 takes a free one. Raises UserError for an address that cannot be listened on.
    """
    return asyncio.run(_serve(server, host, port, drain_seconds))


def _is_of_the_server(record: logging.LogRecord) -> bool:
    """False for what a client sent that is no HTTP, which got status 400 with the reason."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _serve(server: Server, host: str, port: int, drain_seconds: float) -> int:
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    logging.getLogger("aiohttp.server").addFilter(_is_of_the_server)
    # A client that goes away cancels its handler, and so its request.
    runner = web.AppRunner(
        server.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, auto_decompress=False
    )
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except (OSError, OverflowError) as error:
        await runner.cleanup()
        raise UserError(f"cannot listen on {host}:{port}: {error}") from None
    server.start()
    try:
        at = ", ".join(f"{name}:{found}" for name, found, *_ in runner.addresses)
        log.info(f"{server.name} at http://{at}/v1; {server.worker.engine.rows} requests at a time")
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
