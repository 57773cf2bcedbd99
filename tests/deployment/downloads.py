"""The way out of a network without one: a proxy for the package clients of a build, and this machine's own packages.

What listens is in the network of the containers, what connects is outside. A build gets packages from where this
machine gets them: pip's settings are passed on, and folders that they name are served over HTTP.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import re
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

CHUNK = 1 << 18
PASSED_ON = ("constraint", "cert", "timeout", "trusted-host")
"""What a pip inside a base image has to know, apart from where packages are."""


@dataclass(frozen=True)
class PipSettings:
    """Those of this machine. `indexes` and `pages` are URLs or folders; `pages` are lists of files (`--find-links`)."""

    index: str = ""
    indexes: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    others: dict[str, str] = field(default_factory=dict)


def pip_settings() -> PipSettings:
    """As `pip config list` says; what the environment says counts more than files."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found: dict[str, str] = {}
    rows = re.findall(r"^(:env:|global|install|wheel)\.([\w-]+)='(.*)'$", done.stdout, re.MULTILINE)
    for _, name, value in sorted(rows, key=lambda row: row[0] == ":env:"):
        found[name] = value.replace("\\n", " ")
    words = {name: tuple(found.get(name, "").split()) for name in ("extra-index-url", "find-links")}
    others = {name: found[name] for name in PASSED_ON if name in found}
    return PipSettings(found.get("index-url", ""), words["extra-index-url"], words["find-links"], others)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, listening: socket.socket, folders: list[Path]) -> None:
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.folders = folders


class _Handler(BaseHTTPRequestHandler):
    """A proxy for `http://` and, with CONNECT, for `https://`; paths without a host are in one of the folders."""

    server: _Server
    protocol_version = "HTTP/1.1"

    def do_CONNECT(self) -> None:
        host, _, port = self.path.rpartition(":")
        try:
            outside = socket.create_connection((host.strip("[]"), int(port)), 30)
        except OSError as error:
            self.send_error(502, str(error))
            return
        self.close_connection = True
        with outside:
            self.send_response(200)
            self.end_headers()
            self.wfile.flush()
            _copy_both_ways(self.connection, outside)

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if asked.netloc:
            self._pass_on(asked.netloc, asked._replace(scheme="", netloc="").geturl())
            return
        _, number, *rest = unquote(asked.path).split("/")
        folder = self.server.folders[int(number)]
        path = folder.joinpath(*rest)
        if ".." in rest or not path.resolve().is_relative_to(folder.resolve()):
            self.send_error(403)
        elif (path / "index.html").is_file():
            self._send((path / "index.html").read_bytes(), "text/html")
        elif path.is_file():
            self._send(path, "application/octet-stream")
        else:
            self._send(_page(folder, number), "text/html")

    do_HEAD = do_GET

    def _pass_on(self, host: str, path: str) -> None:
        connection = http.client.HTTPConnection(host, timeout=60)
        kept = {name: value for name, value in self.headers.items() if not name.lower().startswith(("proxy-", "conn"))}
        try:
            connection.request(self.command, path or "/", headers=kept)
            answer = connection.getresponse()
        except OSError as error:
            self.send_error(502, str(error))
            return
        with contextlib.closing(connection):
            self.send_response_only(answer.status, answer.reason)
            length = answer.headers.get("Content-Length")
            for name, value in answer.headers.items():
                if name.lower() not in ("connection", "keep-alive", "transfer-encoding"):
                    self.send_header(name, value)
            if length is None:
                self.send_header("Connection", "close")
            self.end_headers()
            while self.command != "HEAD" and (data := answer.read(CHUNK)):
                self.wfile.write(data)

    def _send(self, what: bytes | Path, kind: str) -> None:
        size = what.stat().st_size if isinstance(what, Path) else len(what)
        self.send_response_only(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(what, bytes):
            self.wfile.write(what)
            return
        with what.open("rb") as file:
            self.connection.sendfile(file)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def _page(folder: Path, number: str) -> bytes:
    """All files of the folder: pip takes those of the package that it looks for."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    links = "".join(f'<a href="/{number}/{html.escape(name)}">{html.escape(name)}</a>\n' for name in names)
    return f"<!DOCTYPE html><html><body>\n{links}</body></html>\n".encode()


def _copy_both_ways(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            ready, _, _ = select.select([one, other], [], [], 300)
            if not ready:
                return
            for source in ready:
                data = source.recv(CHUNK)
                if not data:
                    return
                (other if source is one else one).sendall(data)


@dataclass(frozen=True)
class Downloads:
    """`arguments` are build arguments that lead a build to packages; `pip` is for the base image."""

    arguments: dict[str, str]
    pip: dict[str, str]


@contextlib.contextmanager
def served(listening: socket.socket, address: str) -> Iterator[Downloads]:
    """A proxy, and the folders of this machine's pip, on a socket that builds reach at `address`."""
    settings = pip_settings()
    places = [*settings.indexes, *settings.pages]
    # An index has its files beside it, so the folder above is served.
    local = {place: Path(place.removeprefix("file://")) for place in places if place.startswith(("/", "file:"))}
    folders = [path.parent if place in settings.indexes else path for place, path in local.items()]
    here = f"http://{address}:{listening.getsockname()[1]}"
    urls = {place: f"{here}/{number}/{path.name if place in settings.indexes else 'list'}"
            for number, (place, path) in enumerate(local.items())}  # fmt: skip
    extra = [urls.get(place, place) for place in places]
    arguments = {"http_proxy": here, "https_proxy": here, "no_proxy": address}
    arguments |= {"PIP_EXTRA_INDEX_URL": " ".join(extra)} if extra else {}
    arguments |= {"PIP_INDEX_URL": settings.index} if settings.index else {}
    # pip takes nothing from an address without TLS that it was not told to trust.
    trusted = f"{settings.others.get('trusted-host', '')} {address}".strip()
    server = _Server(listening, folders)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Downloads(arguments, {**settings.others, "trusted-host": trusted})
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
