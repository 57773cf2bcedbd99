"""Runs Streamlit, as `python -m streamlit` does, on connections that send at once.

A refresh is a dozen small messages. Streamlit listens on a socket that does not name its protocol, and asyncio switches
Nagle's algorithm off only where TCP is named: a message would then wait for the viewer's browser to acknowledge the one
before, up to 40 ms. A connection inherits the option from the socket that listens.

Whoever sends requests without waiting for answers is read no faster than answered (`tidegate/pipelining.py`).

When it answers, it opens the page that the launcher names in the user's browser.
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
    """All sockets of this process that listen from now on switch the delay off."""
    listen = socket.socket.listen

    def at_once(self: socket.socket, backlog: int = 128, /) -> None:
        if self.family in INTERNET and self.type == socket.SOCK_STREAM:
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listen(self, backlog)

    socket.socket.listen = at_once  # type: ignore[assignment, method-assign]


def read_as_answered() -> None:
    """uvicorn takes Tidegate's protocol where Streamlit names none."""
    HTTP_PROTOCOLS["auto"] = "tidegate.pipelining:Pipelined"


def open_when_ready(health: str, page: str) -> None:
    """Opens `page` once `health` answers; gives up after a minute."""
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
    if told := os.environ.pop(OPEN_VARIABLE, "").split():
        threading.Thread(target=open_when_ready, args=told, daemon=True).start()
    sys.exit(cli.main(prog_name="streamlit"))
