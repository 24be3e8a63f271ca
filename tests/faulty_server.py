"""A web server that misbehaves as a test wants, and a proxy; both remember what they were asked."""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

# Of 127.0.0.1, signed by itself, with its key: worth nothing.
CERTIFICATE = Path(__file__).with_name("self_signed.pem")


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder, ranges included. What it does wrong is a fault for each end of a path, by name:

    drop: (bytes, times) closes the connection after so many bytes of an answer, so often
    stall: the place in the file where answers stop, and end once `go` is set
    hold: the place in the file where answers wait until `go` is set
    slow: seconds before each piece of 64 KiB, or of `piece` bytes
    status: (code, times), with `headers`
    redirect: an address
    replace: other contents
    ranges: "none", or "wrong" for another part than was asked for
    headers: more of them
    """

    daemon_threads = True

    def __init__(self, folder: Path, host: str = "127.0.0.1", *, tls: bool = False) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Handler)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http{'s' if tls else ''}://{shown}:{self.server_port}"
        self.folder = folder
        self.faults: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []  # path, Range
        self.logins: list[str] = []
        self.stalled, self.go = threading.Event(), threading.Event()

    def fault(self, end: str, **what: Any) -> None:
        self.faults[end] = what

    def of(self, path: str) -> dict[str, Any]:
        return next((what for end, what in self.faults.items() if path.endswith(end)), {})

    def ranges(self, end: str) -> list[str]:
        return [header for path, header in self.asked if path.endswith(end)]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that were cut are what is tested."""


def _times(what: dict[str, Any], name: str) -> Any:
    """The value of a fault that is counted, as long as its count lasts."""
    if name not in what or what[name][1] <= 0:
        return None
    value, left = what[name]
    what[name] = (value, left - 1)
    return value


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _end(self, code: int, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        what, asked = self.server.of(path), self.headers.get("Range", "")
        self.server.asked.append((path, asked))
        self.server.logins.append(self.headers.get("Authorization", ""))
        if (code := _times(what, "status")) is not None:
            return self._end(code, **what.get("headers", {}))
        if "redirect" in what:
            return self._end(302, Location=what["redirect"])
        file = self.server.folder / path.lstrip("/")
        if file.is_dir():
            file = file / "index.html"
        if "replace" in what:
            data = what["replace"]
        elif file.is_file():
            data = file.read_bytes()
        else:
            return self._end(404)
        start, match = 0, re.fullmatch(r"bytes=(\d+)-", asked)
        if match and what.get("ranges") != "none":
            start = int(match[1]) if what.get("ranges") != "wrong" else int(match[1]) + 1
            if start >= len(data):
                return self._end(416, Content_Range=f"bytes */{len(data)}")
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        kind = {".html": "text/html", ".json": "application/json"}.get(file.suffix, "application/octet-stream")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data) - start))
        for name, value in what.get("headers", {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send(data[start:], what, start)

    def _send(self, data: bytes, what: dict[str, Any], start: int) -> None:
        limit = _times(what, "drop")
        stall = max(0, what["stall"] - start) if "stall" in what else None
        hold = what.get("hold")
        sent = 0
        while sent < len(data):
            piece = data[sent : sent + what.get("piece", 1 << 16)]
            if limit is not None and sent + len(piece) >= limit:
                self.wfile.write(piece[: limit - sent])
                self.wfile.flush()
                self.close_connection = True
                return
            if stall is not None and sent + len(piece) >= stall:
                self.wfile.write(piece[: stall - sent])
                self.wfile.flush()
                self.server.stalled.set()
                self.server.go.wait(600)
                self.close_connection = True
                return
            if hold is not None and start + sent >= hold:
                self.server.stalled.set()
                self.server.go.wait(600)
            time.sleep(what.get("slow", 0))
            self.wfile.write(piece)
            sent += len(piece)


@contextlib.contextmanager
def serve(folder: Path, host: str = "127.0.0.1", *, tls: bool = False) -> Iterator[Server]:
    with Server(folder, host, tls=tls) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.go.set()
            server.shutdown()
            thread.join()


class Proxy(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _ProxyHandler(http.server.BaseHTTPRequestHandler):
    server: Proxy

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        # A name that only the proxy knows.
        with direct.open(self.path.replace("http://index.example", self.server.behind)) as answer:  # type: ignore[attr-defined]
            data = answer.read()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


@contextlib.contextmanager
def proxy(behind: str) -> Iterator[Proxy]:
    """A proxy that fetches http://index.example from another address."""
    with Proxy() as server:
        server.behind = behind  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
