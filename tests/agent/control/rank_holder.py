"""A process that holds rank 0 of a run until it is killed, for test_rank_ownership: it says hello and renews its
lease."""

from __future__ import annotations

import os
import sys
import threading
import time

from tests.daemon.live import hello
from tidegate.agent.control.process_identity import this_host, this_process
from tidegate.client.daemon_client import DaemonClient
from tidegate.wire.agent import AgentReport

if __name__ == "__main__":
    url, token, run = sys.argv[1:]
    said = hello(run, world_size=1, pid=os.getpid(), host=this_host(), process=this_process())
    with DaemonClient(url, token) as client:
        client.hello(said)
        print("registered", flush=True)
        while True:
            threading.Event().wait(0.5)
            client.report(
                said.agent,
                AgentReport(timestamp=time.time(), step=0, phase="other", generation=0, effective={"stride": 2.0}),
            )
