"""Processes of `python -m tidegate …` that begin where its imports have ended: a fork, 10 ms instead of 1 to 3 s.

The server is a process that has imported the command line and the daemon and has no thread; each child is a fork of it
with its own arguments, environment, folder, standard streams and signals. It is a process like any other: it can be
killed, signalled and waited for, and its exit code is Python's. One server serves a worker of pytest, and ends with it.
What differs from a process that starts anew is that imports are done: tests of what the command line imports, and of
start-up itself, start Python.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_LONGEST_REQUEST = 1 << 17
_STREAMS = 3


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen([sys.executable, "-m", MODULE, …])`, forked by the server. Takes what tests pass: `cwd`, `env`,
    streams and text."""

    def _execute_child(self, args: list[str], executable: Any, preexec: Any, close: Any, passed: Any, cwd: Any,
                       env: Any, startup: Any, flags: Any, shell: Any, in_read: int, in_write: int, out_read: int,
                       out_write: int, err_read: int, err_write: int, *_: Any) -> None:  # fmt: skip
        assert args[:2] == [sys.executable, "-m"], f"{args[:3]} is no module of Python"
        mine, theirs = socket.socketpair()
        request = {"argv": args[2:], "cwd": str(cwd or os.getcwd()), "env": dict(os.environ if env is None else env)}
        streams = [fd if fd >= 0 else number for number, fd in enumerate((in_read, out_write, err_write))]
        with theirs:
            socket.send_fds(_server(), [json.dumps(request).encode()], [theirs.fileno(), *streams])
        self._reply = mine
        self.pid = int(self._reply.recv(32))
        self._child_created = True
        self._close_pipe_fds(in_read, in_write, out_read, out_write, err_read, err_write)  # type: ignore[attr-defined]

    def _told(self, wait: bool) -> int | None:
        """The exit code, once the server has told it."""
        if self.returncode is None:
            self._reply.setblocking(wait)
            with contextlib.suppress(BlockingIOError):
                self.returncode = int(self._reply.recv(32) or -signal.SIGKILL)
                self._reply.close()
        return self.returncode

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._told(wait=False)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        code = self._told(wait=not wait_flags & os.WNOHANG)
        return (0, 0) if code is None else (self.pid, -code if code < 0 else code << 8)


def run(command: list[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run(command, capture_output=True, text=True, …)`."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, text=True, **{**pipes, **options}) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@functools.cache
def _server() -> socket.socket:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno())], cwd=ROOT, stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip

    def end() -> None:
        mine.close()
        server.wait()

    atexit.register(end)
    return mine


# ---- in the server


def serve(requests: socket.socket) -> list[str] | None:
    """Forks for each request and tells who asked the child's process id and later its exit code. Returns in a child,
    with its arguments; None when nobody is left who could ask."""
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    replies: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is woken:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
                _reap(replies)
                continue
            message, fds, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST, 1 + _STREAMS)
            if not message:
                for pid in replies:
                    os.kill(pid, signal.SIGKILL)
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                selector.close()
                for one in (requests, woken, wakes, *replies.values()):
                    one.close()
                return _become(json.loads(message), fds)
            replies[pid] = socket.socket(fileno=fds[0])
            for fd in fds[1:]:
                os.close(fd)
            replies[pid].sendall(str(pid).encode().ljust(32))


def _reap(replies: dict[int, socket.socket]) -> None:
    while replies:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with replies.pop(pid) as reply, contextlib.suppress(BrokenPipeError):
            reply.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request: dict[str, Any], fds: list[int]) -> list[str]:
    """Makes this fork the process that was asked for."""
    os.close(fds[0])
    for number, fd in enumerate(fds[1:]):
        os.dup2(fd, number)
        if fd > 2:
            os.close(fd)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    random.seed()
    arguments: list[str] = request["argv"]
    return arguments


if __name__ == "__main__":
    for name in ("tidegate.cli.main", "tidegate.daemon.server.app", "tidegate.daemon.server.main"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what was imported is neither looked at nor copied by the children's collections of garbage
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        found = serve(asked)
    if found is not None:
        sys.argv[:] = found
        runpy.run_module(found[0], run_name="__main__", alter_sys=True)
