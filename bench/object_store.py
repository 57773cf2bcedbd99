"""Claim: a path in an object store has the same throughput as its client library alone.

Three operations are measured in turn, in interleaved rounds, so that other load on the server or the machine affects
all alike. Tidegate is compared with its client library, obstore, used directly: the same number of threads, the same
objects and bytes, but no checksums and no copies into the engine's buffers. `write` and `read` transfer the state of
all subgroups, one subgroup after the other. `step` is `optimizer.step()` of a model with all of its state on the path;
in the comparison, obstore reads and writes the same bytes at the same time. CPU seconds are those of this process,
including the threads of obstore, without the server.

Without --url a server (moto, in Python) is started on this machine. It shares the cores, so that the rates do not show
the speed of a real store. The shares are still comparable, because both sides use the same server, but they are less
exact if the server is the bottleneck.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import boto3
import httpx
import obstore
import torch
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.store import S3Store

import tidegate
from tidegate.kernels import aligned_buffer

MODES = ("write", "read", "step")
BUCKET = "bench"
STATE_BYTES = 8  # moments of an fp32 weight


@dataclass(frozen=True)
class Spent:
    bytes_per_second: float
    cpu_seconds_per_gigabyte: float


def spent(work: Callable[[], int]) -> Spent:
    """Calls `work`, which returns the number of bytes that it has transferred. Returns the throughput, and the CPU time
    per gigabyte."""
    before, start = os.times(), time.monotonic()
    nbytes = work()
    seconds, after = time.monotonic() - start, os.times()
    cpu = after.user + after.system - before.user - before.system
    return Spent(nbytes / seconds, cpu / nbytes * 1e9)


class Bare:
    """The client library (obstore) alone, without Tidegate."""

    def __init__(self, settings: tidegate.ObjectSettings, subgroups: int, subgroup_bytes: int) -> None:
        server = settings.server
        self._store = S3Store(
            settings.bucket,
            prefix=f"{settings.prefix}/bare",
            region=settings.region or "us-east-1",
            credential_provider=Boto3CredentialProvider(boto3.Session()),
            unsigned_payload=not server.startswith("http://"),
            client_options={"allow_http": server.startswith("http://"), "timeout": timedelta(seconds=60)},
            **({"endpoint": server} if server else {}),
        )
        self._data = memoryview(aligned_buffer(subgroup_bytes))
        size = settings.block_bytes
        self._blocks = [(at, min(size, subgroup_bytes - at)) for at in range(0, subgroup_bytes, size)]
        self._subgroups = subgroups
        self._pools = [ThreadPoolExecutor(settings.threads) for _ in range(2)]
        self._turn = 0

    def write(self) -> int:
        self._turn += 1
        return self._all(self._begin_write)

    def read(self) -> int:
        return self._all(self._begin_read)

    def step(self) -> int:
        """Reads the previous state and writes the next one at the same time, as an update does. Returns the number of
        bytes."""
        read = ThreadPoolExecutor(1).submit(self._all, self._begin_read, self._turn)
        written = self.write()
        return read.result() + written

    def _all(self, begin: Callable[[int, int], list[Future[Any]]], turn: int | None = None) -> int:
        for subgroup in range(self._subgroups):
            for future in begin(subgroup, self._turn if turn is None else turn):
                future.result()
        return self._subgroups * len(self._data)

    def _begin_write(self, subgroup: int, turn: int) -> list[Future[Any]]:
        return [
            self._pools[0].submit(
                obstore.put, self._store, f"{turn}/{subgroup}/{at}", self._data[at : at + size], use_multipart=False
            )
            for at, size in self._blocks
        ]

    def _begin_read(self, subgroup: int, turn: int) -> list[Future[Any]]:
        return [
            self._pools[1].submit(obstore.get_range, self._store, f"{turn}/{subgroup}/{at}", start=0, length=size)
            for at, size in self._blocks
        ]

    def tidy(self) -> None:
        """Deletes the objects that earlier writes have left, and keeps those of the last write."""
        keys = [one["path"] for page in obstore.list(self._store) for one in page]
        obstore.delete(self._store, [key for key in keys if not key.startswith(f"{self._turn}/")])

    def close(self) -> None:
        self._turn += 1
        self.tidy()


class Ours:
    """A Tidegate optimizer with all of its state on the path."""

    def __init__(self, settings: tidegate.ObjectSettings, subgroups: int, subgroup_numel: int) -> None:
        self._params = [torch.nn.Parameter(torch.zeros(subgroups * subgroup_numel))]
        self._params[0].grad = torch.ones(subgroups * subgroup_numel)
        offload = tidegate.Offload(
            paths={"store": settings}, host_cache=0, stride="off", subgroup_numel=subgroup_numel, device="emulated",
            emulated=tidegate.EmulatedRates(
                h2d_bytes_per_second=1e12, d2h_bytes_per_second=1e12, update_params_per_second=1e12
            ),
        )  # fmt: skip
        self.optimizer = tidegate.AdamW(self._params, offload=offload)
        self._path = self.optimizer.engine.store.paths["store"]
        self._subgroups, self._nbytes = subgroups, subgroup_numel * STATE_BYTES
        self._memory = aligned_buffer(self._nbytes)
        self.step()

    def write(self) -> int:
        """Writes state for all subgroups to the path, and returns the number of bytes. The state is zeros for all
        subgroups, and has the step number of the last step."""
        address, step = self._memory.ctypes.data, self._path.states[0].step
        return sum(self._path.write(subgroup, address, step).nbytes for subgroup in range(self._subgroups))

    def read(self) -> int:
        address = self._memory.ctypes.data
        return sum(self._path.read(subgroup, address).nbytes for subgroup in range(self._subgroups))

    def step(self) -> int:
        before = sum(self._path.counters.bytes.values())
        self.optimizer.step()
        return sum(self._path.counters.bytes.values()) - before


@contextmanager
def server(args: argparse.Namespace) -> Iterator[tidegate.ObjectSettings]:
    """The settings of the object store to measure: those of the arguments, or of a server that is started here and
    ended with the context."""
    common = {"threads": args.threads, "block_bytes": args.block_bytes}
    if args.url:
        yield tidegate.ObjectSettings(url=args.url, endpoint=args.endpoint, **common)
        return
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "bench")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        endpoint = f"http://127.0.0.1:{port}"
        httpx.Client(transport=httpx.HTTPTransport(retries=8)).get(f"{endpoint}/moto-api/data.json")
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket=BUCKET)
        yield tidegate.ObjectSettings(url=f"s3://{BUCKET}/tide", endpoint=endpoint, **common)
    finally:
        process.kill()
        process.wait()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with server(args) as settings:
        numel = args.subgroup_bytes // STATE_BYTES
        bare, ours = Bare(settings, args.subgroups, args.subgroup_bytes), Ours(settings, args.subgroups, numel)
        rounds: dict[str, list[tuple[Spent, Spent]]] = {mode: [] for mode in MODES}
        bare.write()
        try:
            for number in range(args.warmup + args.rounds):
                for mode in MODES:
                    sides = [getattr(ours, mode), getattr(bare, mode)]
                    order = (0, 1) if number % 2 else (1, 0)
                    found = {side: spent(sides[side]) for side in order}
                    if number >= args.warmup:
                        rounds[mode].append((found[0], found[1]))
                bare.tidy()
                print(f"round {number + 1} of {args.warmup + args.rounds}", file=sys.stderr)
        finally:
            bare.close()
            ours.optimizer.close()
    return {
        "share": {mode: summary([a.bytes_per_second / b.bytes_per_second for a, b in rounds[mode]]) for mode in MODES},
        "megabytes_per_second": sides_of(rounds, lambda one: one.bytes_per_second / 1e6),
        "cpu_seconds_per_gigabyte": sides_of(rounds, lambda one: one.cpu_seconds_per_gigabyte),
        "server": args.endpoint or ("Amazon S3" if args.url else "moto on the same cores"),
        "client": f"obstore {obstore.__version__}",
        "subgroups": args.subgroups,
        "subgroup_bytes": args.subgroup_bytes,
        "block_bytes": args.block_bytes,
        "threads": args.threads,
        "rounds": args.rounds,
        "cores": os.cpu_count(),
        "processor": processor(),
        "load": os.getloadavg()[0],
    }


def sides_of(rounds: dict[str, list[tuple[Spent, Spent]]], figure: Callable[[Spent], float]) -> dict[str, Any]:
    return {
        mode: {
            "tidegate": summary([figure(ours) for ours, _ in found]),
            "obstore": summary([figure(bare) for _, bare in found]),
        }
        for mode, found in rounds.items()
    }


def summary(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(middle, 3), "quartile_1": round(low, 3), "quartile_3": round(high, 3)}


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="", help="s3://bucket/prefix of a store to measure; credentials as AWS tools")
    parser.add_argument("--endpoint", default="", help="its server, where not Amazon's")
    parser.add_argument("--subgroups", type=int, default=4)
    parser.add_argument("--subgroup-bytes", type=int, default=64 << 20)
    parser.add_argument("--block-bytes", type=int, default=8 << 20)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2, because the result has quartiles over rounds")
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return
    for mode in MODES:
        ours, bare = result["megabytes_per_second"][mode].values()
        print(f"{mode:6} {ours['median']:8,.0f} MB/s, client alone {bare['median']:8,.0f}, share", end=" ")
        print("{median} ({quartile_1} to {quartile_3})".format(**result["share"][mode]))


if __name__ == "__main__":
    main()
