"""Thousands of hostile requests to a real daemon: none is answered with a failure, and all that is honest goes on."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import socket
import threading
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.daemon.live import Agent, Daemon, Process, new_run
from tests.daemon.routes.test_borders import ODD_KEYS, ODD_VALUES, RATES, SIZES, all_is_well, bodies, places, sent
from tidegate.errors import DaemonError

MESSAGES = 6_000
RAW_REQUESTS = 2_000
QUERIES = 1_500
GROWTH_BYTES = 200 << 20
"""How much memory the daemon may take on the way."""

PUT_IN = (b"\r\n", b"\0", b"\xff\xfe", b"Transfer-Encoding: chunked\r\n", b"x" * 5_000)
PATHS = ("v1", "runs", "ranks", "0", "steps", "knobs", "..", "%2e%2e", "%00", "%ed%a0%80", "a" * 3_000, "*", "")
QUESTIONS = ("", "/ranks/0/steps", "/knobs", "/audit", "/alerts", "/events", "/advice")

REQUEST = b"""POST /v1/agents HTTP/1.1\r
Host: %(host)s\r
Authorization: Bearer %(token)s\r
Content-Type: application/json\r
Content-Length: %(length)d\r
\r
%(body)s"""


def made_odd(message: dict[str, object], dice: random.Random) -> dict[str, object]:
    """A copy with odd values or keys in one to four places."""
    made: dict[str, object] = copy.deepcopy(message)
    for _ in range(dice.randint(1, 4)):
        holder, key = dice.choice(list(places(made)))
        if isinstance(holder, dict) and dice.random() < 0.2:
            holder[dice.choice(ODD_KEYS)] = copy.deepcopy(dice.choice(ODD_VALUES))
        else:
            holder[key] = copy.deepcopy(dice.choice(ODD_VALUES))
    return made


def damaged(request: bytes, dice: random.Random) -> bytes:
    """Bytes that were changed, cut out, repeated or put in."""
    made = bytearray(request)
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(made) + 1)
        match dice.randrange(4):
            case 0:
                made[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                del made[at : at + dice.randrange(40)]
            case 2:
                made[at:at] = made[at : at + dice.randrange(200)] * dice.randrange(4)
            case _:
                made[at:at] = dice.choice(
                    [b"\r\n", b"\0", b"\xff\xfe", b"Transfer-Encoding: chunked\r\n", b"x" * 5_000]
                )
    return bytes(made)


def answered(daemon: Daemon, request: bytes) -> str:
    """The status that a connection of its own got for these bytes, or that it was closed without one."""
    url = urlsplit(daemon.url)
    with socket.create_connection((url.hostname, url.port), timeout=10) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
        head = b""
        with contextlib.suppress(OSError):
            while b"\r\n" not in head and (part := connection.recv(4096)):
                head += part
    words = head.split(b"\r\n")[0].split(b" ")
    return words[1].decode() if len(words) > 1 else "closed"


def query(dice: random.Random, run: str) -> tuple[str, str]:
    """A method and an address that is near a real one."""
    path = "/" + "/".join(dice.choice(PATHS) for _ in range(dice.randint(1, 6)))
    if dice.random() < 0.7:
        path = f"/v1/runs/{run}" + dice.choice(
            ["", "/ranks/0/steps", "/knobs", "/audit", "/alerts", "/events", "/advice"]
        )
    values = ["-1", "nan", "1e400", "%00", "%ff", "9" * 400, "true", "", "[]"]
    names = ["limit", "wait", "step", "after", "runs", "dry_run", "x"]
    asked = "&".join(f"{dice.choice(names)}={dice.choice(values)}" for _ in range(dice.randint(0, 4)))
    method = dice.choice(["GET", "GET", "GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "PROPFIND"])
    return method, f"{path}?{asked}" if asked else path


@pytest.mark.torture
def test_hostile_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Odd messages with good tokens, bytes that are no HTTP, and addresses that are none."""
    dice = random.Random(20_261_124)
    with Process(tmp_path) as process:
        daemon = process.start()
        assert process.process is not None
        pid = process.process.pid
        said: list[str] = []
        assert process.process.stdout is not None
        reader = threading.Thread(target=said.extend, args=(process.process.stdout,))
        reader.start()
        agent = Agent(daemon, new_run(), subgroups=SIZES, paths=("nvme",))
        agent.train(30, 1.0)
        agent.say(rates=RATES, effective={"stride": 2.0, "host_cache": 0})
        run = agent.message.run
        before = psutil.Process(pid).memory_info().rss
        good = list(bodies(agent).items())

        messages: Counter[int] = Counter()
        for _ in range(MESSAGES):
            (method, path, scope), body = dice.choice(good)
            messages[sent(daemon, method, path, scope, made_odd(body, dice)).status_code] += 1
        all_is_well(daemon, run)

        url = urlsplit(daemon.url)
        body = json.dumps(good[0][1]).encode()
        host, token = url.netloc.encode(), daemon.tokens["agent"].encode()
        request = REQUEST % {b"host": host, b"token": token, b"length": len(body), b"body": body}
        raw = Counter(answered(daemon, damaged(request, dice)) for _ in range(RAW_REQUESTS))
        all_is_well(daemon, run)

        queries: Counter[str] = Counter()
        for _ in range(QUERIES):
            method, path = query(dice, run)
            head = f"Host: {url.netloc}\r\nAuthorization: Bearer {daemon.tokens['read']}"
            queries[answered(daemon, f"{method} {path} HTTP/1.1\r\n{head}\r\n\r\n".encode())] += 1
        all_is_well(daemon, run)

        with contextlib.suppress(DaemonError):
            agent.say()
        grown = psutil.Process(pid).memory_info().rss - before
        assert process.process.poll() is None
        process.process.kill()
        reader.join()
    with capsys.disabled():
        print(f"\n{MESSAGES} odd messages: {dict(messages)}; {RAW_REQUESTS} damaged requests: {dict(raw)}; "
              f"{QUERIES} odd addresses: {dict(queries)}; memory grew by {grown >> 20} MiB, "
              f"{len(said)} lines were logged")  # fmt: skip
    failures = [status for status in (*raw, *queries) if status.startswith("5") and status not in ("501", "505")]
    assert failures == []
    assert not [status for status in messages if status >= 500]
    assert grown < GROWTH_BYTES
