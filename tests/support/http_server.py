"""An HTTP server of a test, and requests that it may answer by a reset of the connection."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class HttpServer:
    """Serves at `url`, while it is entered. Handlers find it as their `owner`."""

    def __init__(self, handler: type[ResettingHandler], port: int = 0):
        owned = type(handler.__name__, (handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), owned)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class ResettingHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Any

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def reset(self) -> None:
        """RST rather than a tidy end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""
