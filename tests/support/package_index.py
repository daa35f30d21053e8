"""A package index (PEP 503 in JSON, PEP 691) of some wheels, which refuses what public indexes refuse."""

import hashlib
import json
from pathlib import Path

from packaging.utils import parse_wheel_filename

from tests.support.http_server import HttpServer, ResettingHandler


class PackageIndex(HttpServer):
    """Wheels by name at `url`/simple/. Raises ValueError for a local version (1.2+x)."""

    def __init__(self, wheels: list[Path], upload_time: str):
        super().__init__(_Handler)
        self.files = {wheel.name: wheel for wheel in wheels}
        self.projects: dict[str, list[dict]] = {}
        for wheel in wheels:
            name, version, _, _ = parse_wheel_filename(wheel.name)
            if version.local:
                raise ValueError(f"{wheel.name}: local version")
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            entry = {"filename": wheel.name, "url": f"{self.url}/files/{wheel.name}", "hashes": {"sha256": digest}}
            self.projects.setdefault(name, []).append(
                entry | {"size": wheel.stat().st_size, "upload-time": upload_time}
            )


class _Handler(ResettingHandler):
    def do_GET(self) -> None:
        kind, _, name = self.path.strip("/").partition("/")
        if kind == "simple" and name in self.owner.projects:
            page = {"meta": {"api-version": "1.1"}, "name": name, "versions": [], "files": self.owner.projects[name]}
            self._answer(json.dumps(page).encode(), "application/vnd.pypi.simple.v1+json")
        elif kind == "files" and name in self.owner.files:
            self._answer(self.owner.files[name].read_bytes(), "application/octet-stream")
        else:
            self.send_error(404)

    def _answer(self, body: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET
