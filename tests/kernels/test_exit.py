"""A process ends in peace while threads of its own are still in native code."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading, time
from tidegate import kernels

buffer = kernels.aligned_buffer(4096)
{prepare}

def work():
    while True:
        {call}

for _ in range(8):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""
CALLS = {
    "crc32c": ("", "kernels.crc32c(buffer.ctypes.data, 64)"),
    "wait": (
        "pool = kernels.IoPool(1); zeros = open('/dev/zero'); "
        "ticket = pool.read(zeros.fileno(), buffer.ctypes.data, 4096, 0, 4096)",
        "ticket.wait(0.0001)",
    ),
}


def test_daemon_threads_in_native_code_do_not_abort_the_process() -> None:
    for name, (prepare, call) in CALLS.items():
        program = PROGRAM.format(prepare=prepare, call=call)
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, ""), name
