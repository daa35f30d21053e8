"""An HTTP proxy that fails: some of the requests, or a connection in the middle of what it carries."""

import http.client
import random
import threading
import time

from tests.support.http_server import HttpServer, ResettingHandler

_CHUNK = 64 * 1024
_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}


class FaultyProxy(HttpServer):
    """Forwards to http://127.0.0.1:`port`; `url` is its own address. As a context manager it serves until it is left.

    rate: of requests that fail, with the seed's luck: a third each with status 500, with 503, and by a connection reset,
        before the store sees them or (for a reset) after.
    drop_after: bytes of request bodies after which one connection is cut in the middle; set it anew for another cut.
    closes_after: bytes of request bodies after which every connection is reset, for good.
    stalls_after: bytes of request bodies after which every connection waits, until it is negative again; then `stalled`.
    cut_answers: bytes of an answer's body after which its connection is cut, for so many answers: [bytes, answers left].
    closed: refuses all.
    received: bytes of request bodies that went through to the store. faults: how many were injected.
    """

    def __init__(self, port: int, rate: float = 0.0, seed: int = 0):
        super().__init__(_Handler)
        self.rate, self.drop_after, self.closes_after = rate, -1, -1
        self.stalls_after, self.stalled = -1, False
        self.cut_answers, self.closed = [0, 0], False
        self.received = self.faults = self.requests = 0
        self._random, self._lock, self._target = random.Random(seed), threading.Lock(), port

    def draw(self) -> str | None:
        """The fault of a request, if it gets one."""
        with self._lock:
            self.requests += 1
            if self.closed or self._random.random() < self.rate:
                self.faults += 1
                return self._random.choice(["500", "503", "reset before", "reset after"])
            return None

    def count(self, size: int) -> bool:
        """Counts bytes of a body on their way; False when the connection is to be cut here."""
        while 0 <= self.stalls_after < self.received + size:
            self.stalled = True
            time.sleep(0.01)
        with self._lock:
            if 0 <= self.drop_after < self.received + size:
                self.drop_after = -1
                self.faults += 1
                return False
            self.closed = self.closed or 0 <= self.closes_after < self.received + size
            if self.closed:
                return False
            self.received += size
            return True

    def allowance(self, size: int) -> int:
        """Number of bytes of an answer's body to let through."""
        with self._lock:
            at, left = self.cut_answers
            if left and size > at:
                self.cut_answers = [at, left - 1]
                self.faults += 1
                return at
            return size


class _Handler(ResettingHandler):
    owner: FaultyProxy

    def _carry(self) -> None:
        fault = self.owner.draw()
        if fault == "reset before":
            return self.reset()
        body = self._body()
        if body is None:
            return self.reset()
        if fault in ("500", "503"):
            self.send_response(int(fault))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        upstream = http.client.HTTPConnection("127.0.0.1", self.owner._target, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        upstream.request(self.command, self.path, body or None, headers)
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        if fault == "reset after":
            return self.reset()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        allowed = self.owner.allowance(len(content))
        self.wfile.write(content[:allowed])
        if allowed < len(content):
            self.wfile.flush()
            return self.reset()
        return None

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _carry

    def _body(self) -> bytes | None:
        """Read the body; None when the connection is to be cut before its end."""
        left = int(self.headers.get("Content-Length") or 0)
        chunks = []
        while left:
            chunk = self.rfile.read(min(left, _CHUNK))
            if not chunk or not self.owner.count(len(chunk)):
                return None
            chunks.append(chunk)
            left -= len(chunk)
        return b"".join(chunks)
