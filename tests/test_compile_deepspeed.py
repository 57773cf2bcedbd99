"""Locks of compilations that were killed are removed; a compilation that goes on keeps its lock."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from tests import compile_deepspeed

COMPILES = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("holds", flush=True)
time.sleep(600)
"""


def test_a_lock_of_this_process_is_seen_whichever_other_files_it_opens(tmp_path: Path) -> None:
    """The listing of its open files is an open file, too, and gone when it is looked at."""
    lower = (tmp_path / "lower").open("w")
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    lower.close()
    assert compile_deepspeed.holders(lock) == [os.getpid()]
    baton.release()
    assert compile_deepspeed.holders(lock) == []


def test_a_lock_is_removed_once_the_compilation_that_held_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_deepspeed, "ABANDONED_SECONDS", 0.1)
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    compilation = subprocess.Popen([sys.executable, "-c", COMPILES, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert compilation.stdout is not None
        assert compilation.stdout.readline() == "holds\n"
        compile_deepspeed.remove_abandoned_locks(tmp_path)
        assert compile_deepspeed.holders(lock) == [compilation.pid]
        assert lock.exists()
    finally:
        compilation.send_signal(signal.SIGKILL)
        compilation.communicate()
    assert lock.exists()
    compile_deepspeed.remove_abandoned_locks(tmp_path)
    assert not lock.exists()
    assert f"its lock {lock} is removed" in capsys.readouterr().err
