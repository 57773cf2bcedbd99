"""Runs Streamlit, as `python -m streamlit` does, on connections that send at once.

A refresh is a dozen small messages. Streamlit listens on a socket that does not name its protocol, and asyncio switches
Nagle's algorithm off only where TCP is named: a message would then wait for the viewer's browser to acknowledge the one
before, up to 40 ms. A connection inherits the option from the socket that listens.
"""

from __future__ import annotations

import socket
import sys

from streamlit.web import cli

INTERNET = (socket.AF_INET, socket.AF_INET6)


def send_at_once() -> None:
    """All sockets of this process that listen from now on switch the delay off."""
    listen = socket.socket.listen

    def at_once(self: socket.socket, backlog: int = 128, /) -> None:
        if self.family in INTERNET and self.type == socket.SOCK_STREAM:
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listen(self, backlog)

    socket.socket.listen = at_once  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    send_at_once()
    sys.exit(cli.main(prog_name="streamlit"))
