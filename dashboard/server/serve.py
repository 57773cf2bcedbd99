"""Runs Streamlit, as `python -m streamlit` does, on connections with TCP_NODELAY (without Nagle's algorithm).

A refresh of a page is a dozen small messages. Streamlit creates its listening socket without a protocol number, and
asyncio sets TCP_NODELAY only on sockets with the number IPPROTO_TCP. Without the option a message waits up to 40 ms,
until the browser has acknowledged the message before. Connections inherit the option from the listening socket.

If a client sends requests without waiting for answers, they are read no faster than they are answered
(`tidegate/pipelining.py`). If the launcher has set `OPEN_VARIABLE`, this module opens a page in the user's browser when
the server is ready.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import urllib.request
import webbrowser
from typing import Final

from streamlit.web import cli
from uvicorn.config import HTTP_PROTOCOLS

from tidegate.dashboard import OPEN_VARIABLE

START_SECONDS: Final = 60.0

INTERNET = (socket.AF_INET, socket.AF_INET6)


def send_at_once() -> None:
    """Sets TCP_NODELAY on all TCP sockets of this process that listen from now on."""
    listen = socket.socket.listen

    def at_once(self: socket.socket, backlog: int = 128, /) -> None:
        if self.family in INTERNET and self.type == socket.SOCK_STREAM:
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listen(self, backlog)

    socket.socket.listen = at_once  # type: ignore[assignment, method-assign]


def read_as_answered() -> None:
    """Makes `PipelinedProtocol` the default HTTP protocol of uvicorn. It reads no more from a client while a request of
    this client waits until an earlier request is answered. No effect if Streamlit names another protocol."""
    HTTP_PROTOCOLS["auto"] = "tidegate.pipelining:PipelinedProtocol"


def open_when_ready(health: str, page: str) -> None:
    """Opens the address `page` in a browser once the address `health` answers; gives up after a minute."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    latest = time.monotonic() + START_SECONDS
    while time.monotonic() < latest:
        try:
            with opener.open(health, timeout=2.0):
                webbrowser.open(page)
                return
        except OSError:
            time.sleep(0.1)


if __name__ == "__main__":
    send_at_once()
    read_as_answered()
    if health_and_page := os.environ.pop(OPEN_VARIABLE, "").split():
        threading.Thread(target=open_when_ready, args=health_and_page, daemon=True).start()
    sys.exit(cli.main(prog_name="streamlit"))
