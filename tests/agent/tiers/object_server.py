"""A real S3 server as a process of its own, and a gate in front of it that refuses what a test wants refused."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import httpx
import pytest

from tests.services import ROOT, free_port, until
from tidegate.agent.tiers.object_settings import ObjectSettings

SECRET = "tide-secret-0123456789abcdef"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "TIDEKEY",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
BUCKET = "tides"


@dataclass
class S3Server:
    """moto's server: objects are in its memory, and go with it."""

    port: int = field(default_factory=free_port)
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            cwd=ROOT, env={**os.environ, **self.env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until(self._answers, "the S3 server")
        self.client.create_bucket(Bucket=BUCKET)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.endpoint}/moto-api/data.json").is_success
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def client(self) -> Any:
        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1", aws_access_key_id="TIDEKEY",
            aws_secret_access_key=SECRET,
        )  # fmt: skip

    def keys(self, prefix: str = "") -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [one["Key"] for one in found.get("Contents", [])]

    def get(self, key: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return body

    def put(self, key: str, body: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=body)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)


@contextmanager
def s3_server(**env: str) -> Iterator[S3Server]:
    server = S3Server(env=env)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def use_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def settings_of(endpoint: str, prefix: str, **changes: Any) -> ObjectSettings:
    """Small blocks, so that each subgroup is several objects; what fails is given up soon."""
    wanted = {"block_bytes": 16384, "threads": 3, "retry_seconds": 0.3}
    return ObjectSettings(url=f"s3://{BUCKET}/{prefix}", endpoint=endpoint, **(wanted | changes))


# ---- a gate that can refuse


@dataclass(frozen=True)
class Asked:
    method: str
    path: str


@dataclass
class Gate:
    """Hands requests on to the server, but for those to which `answer` gives a status, or 0: then it hangs up."""

    endpoint: str
    answer: Callable[[Asked], int | None] = lambda _: None
    asked: list[Asked] = field(default_factory=list)


@contextmanager
def gate(server: S3Server) -> Iterator[Gate]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            asked = Asked(self.command, self.path)
            made.asked.append(asked)
            status = made.answer(asked)
            if status == 0:
                self.close_connection = True
            elif status is not None:
                self.give(status, [], b"<Error><Code>Injected</Code></Error>")
            else:
                behind = http.client.HTTPConnection("127.0.0.1", server.port)
                behind.request(self.command, self.path, body, dict(self.headers))
                found = behind.getresponse()
                given = found.read()
                headers = [(k, v) for k, v in found.getheaders() if k.lower() not in ("connection", "content-length")]
                self.give(found.status, headers, given)
                behind.close()

        def give(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        def log_message(self, *_: Any) -> None:
            pass

    front = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    front.daemon_threads = True
    made = Gate(f"http://127.0.0.1:{front.server_port}")
    thread = threading.Thread(target=front.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        front.shutdown()
        thread.join()
        front.server_close()
