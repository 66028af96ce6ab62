"""A plain http server of a folder, with ranges, redirects and a password."""

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class HttpServer:
    """A running server; its fields may be changed.

    Attributes:
        port: on 127.0.0.1.
        folder: what it serves.
        ranges: whether it answers a Range with that range.
        lengths: whether it tells the length of an answer.
        login: ``user:password`` that it asks for.
        redirects: path -> the Location that it answers with.
        log: path with query, and Range header, of every request.
    """

    port: int
    folder: Path
    ranges: bool = True
    lengths: bool = True
    login: str | None = None
    redirects: dict[str, str] = field(default_factory=dict)
    log: list[tuple[str, str | None]] = field(default_factory=list)
    logins: list[str | None] = field(default_factory=list)


@contextmanager
def http_server(folder: Path) -> Iterator[HttpServer]:
    """Serve a folder until the end of the block."""
    settings = HttpServer(0, folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, settings)) as server:
        settings.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield settings
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, settings: HttpServer, *arguments: object) -> None:
        self._settings = settings
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        settings, path = self._settings, urlsplit(self.path).path
        wanted = self.headers["Range"]
        settings.log.append((self.path, wanted))
        settings.logins.append(self.headers["Authorization"])
        if settings.login and self.headers["Authorization"] != _basic(settings.login):
            return self._answer(401, b"")
        if path in settings.redirects:
            return self._answer(302, b"", Location=settings.redirects[path])
        file = settings.folder / unquote(path).lstrip("/")
        if not file.is_file():
            return self._answer(404, b"")
        content = file.read_bytes()
        if not wanted or not settings.ranges:
            return self._answer(200, content)
        start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if start >= len(content):
            return self._answer(416, b"")
        return self._answer(206, content[start:], Content_Range=f"bytes {start}-{len(content) - 1}/{len(content)}")

    def _answer(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if self._settings.lengths:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


def _basic(login: str) -> str:
    return "Basic " + base64.b64encode(login.encode()).decode()
