"""The end of the process waits for threads of torch's gloo backend: unwound inside torch, they end it with SIGABRT."""

from __future__ import annotations

import ctypes
import threading
import time

import torch
import torch.distributed as dist

from tests.services import until
from tidegate.agent.engine.interpreter_exit import _GLOO_THREAD, _states_of_threads, _wait_for_gloo

PR_SET_NAME = 15


def test_gloo_names_its_threads_as_we_think_and_they_sleep_without_work() -> None:
    assert not _states_of_threads(_GLOO_THREAD)
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        dist.broadcast(torch.zeros(3), 0)
        began = time.monotonic()
        _wait_for_gloo(began + 10)
        assert time.monotonic() - began < 5
        assert set(_states_of_threads(_GLOO_THREAD)) == {"S"}
    finally:
        dist.destroy_process_group()
    until(lambda: not _states_of_threads(_GLOO_THREAD), "the end of gloo's threads")


def test_a_thread_of_gloo_that_is_at_work_is_waited_for_but_not_for_ever() -> None:
    works, stop = threading.Event(), threading.Event()
    ended: list[float] = []

    def work() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, _GLOO_THREAD.encode(), 0, 0, 0)
        works.set()
        while not stop.is_set():
            pass
        ended.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    assert works.wait(10)
    began = time.monotonic()
    _wait_for_gloo(began + 0.3)
    assert 0.3 <= time.monotonic() - began < 5
    threading.Timer(0.3, stop.set).start()
    _wait_for_gloo(time.monotonic() + 30)
    assert ended
    thread.join()
