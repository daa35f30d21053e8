"""An S3 server over a folder, to read from, slow or failing: `python -m tests.support.folder_store FOLDER --delay 0.05`."""

import argparse
import random
import re
import threading
import time
from collections import Counter
from pathlib import Path

from tests.support.http_server import HttpServer, ResettingHandler


class FolderStore(HttpServer):
    """Serves FOLDER/BUCKET/KEY as s3://BUCKET/KEY at `url`, while it is entered.

    delay: seconds before each answer. failures: share of requests that are answered by 500 or 503, or by a reset connection.
    truncations: share of bodies that end early: half of them as if that were all, half in the middle of what was announced.
    corrupt: objects, by BUCKET/KEY, of which so many answers have a wrong byte.
    faults, requests: how many there were, by kind; by object.
    """

    def __init__(
        self,
        folder: Path,
        *,
        delay: float = 0.0,
        failures: float = 0.0,
        truncations: float = 0.0,
        corrupt: dict[str, int] | None = None,
        seed: int = 0,
        port: int = 0,
    ):
        super().__init__(_Handler, port)
        self.folder, self.delay, self.failures, self.truncations = folder, delay, failures, truncations
        self.corrupt = dict(corrupt or {})
        self.faults: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self._random, self._lock = random.Random(seed), threading.Lock()

    def fault(self, kinds: dict[str, float]) -> str | None:
        """One of the kinds, each with its probability, or none."""
        with self._lock:
            drawn = self._random.random()
            for kind, share in kinds.items():
                drawn -= share
                if drawn < 0:
                    self.faults[kind] += 1
                    return kind
        return None

    def content(self, name: str, begin: int, end: int) -> bytes:
        """Bytes of an object, with a wrong one among them where it is to be corrupt."""
        with (self.folder / name).open("rb") as file:
            file.seek(begin)
            found = bytearray(file.read(end - begin))
        with self._lock:
            if self.corrupt.get(name, 0) > 0 and found:
                self.corrupt[name] -= 1
                self.faults["corrupt"] += 1
                found[len(found) // 2] ^= 4
        return bytes(found)


class _Handler(ResettingHandler):
    owner: FolderStore

    def do_GET(self) -> None:
        owner = self.owner
        name = self.path.partition("?")[0].lstrip("/")
        owner.requests[name] += 1
        time.sleep(owner.delay)
        kind = owner.fault(dict.fromkeys(("500", "503", "reset"), owner.failures / 3))
        if kind == "reset":
            return self.reset()
        if kind:
            return self._answer(int(kind))
        file = owner.folder / name
        if not file.is_file():
            return self._answer(404)
        size = file.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        begin, end = (int(asked[1]), min(int(asked[2] or size) + 1, size)) if asked else (0, size)
        content = b"" if self.command == "HEAD" else owner.content(name, begin, end)
        headers = {"ETag": f'"{size}"', "Last-Modified": "Tue, 24 Nov 2026 00:00:00 GMT"}
        if asked:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        kind = content and owner.fault(dict.fromkeys(("short", "cut"), owner.truncations / 2))
        if kind == "short":
            content = content[: len(content) // 2]
        length = len(content) if content else end - begin
        self._answer(206 if asked else 200, headers, length, content[: length // 2] if kind == "cut" else content)
        if kind == "cut":
            self.wfile.flush()
            self.reset()

    do_HEAD = do_GET

    def _answer(
        self, status: int, headers: dict[str, str] | None = None, length: int = 0, content: bytes = b""
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    """Serve until the process is ended; prints the address."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--failures", type=float, default=0.0)
    parser.add_argument("--truncations", type=float, default=0.0)
    args = parser.parse_args()
    with FolderStore(args.folder, delay=args.delay, failures=args.failures, truncations=args.truncations) as store:
        print(store.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
