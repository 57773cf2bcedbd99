"""NVML through the real `pynvml`, over a library that the tests build: what GPUs and drivers are known to answer."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tidegate
from tests.agent.training import Training
from tests.services import free_port, until
from tidegate.agent.telemetry import rank_metrics
from tidegate.agent.telemetry.gpu import COMPARE_SECONDS, GpuFigures, GpuSampler
from tidegate.agent.telemetry.nvml import (
    MAX_LINK_BYTES_PER_SECOND,
    PERIOD_SECONDS,
    WRAP_PERIOD_SECONDS,
    Gpu,
    WrappingCounter,
    open_gpu,
)

SOURCE = Path(__file__).with_name("nvml_stub.c")
UUID = "GPU-00000000-0000-0000-0000-000000000000"
U32, U64, DOUBLE = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 0
RETURNS = ("init", "handle", "fields", "gpm", "throughput", "utilization")
NO = pynvml.NVML_ERROR_NOT_SUPPORTED
MIB = 2**20


class Stub(ctypes.Structure):
    """The variable `stub` of the library."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in (*RETURNS, "gpm_supported", "value_type", "initialised", "samples")),
        ("busy_percent", ctypes.c_uint32),
        ("narrow", ctypes.c_uint32),
        ("tx", ctypes.c_uint64),
        ("rx", ctypes.c_uint64),
        ("tx_mib", ctypes.c_double),
        ("rx_mib", ctypes.c_double),
        ("mig_mode", ctypes.c_int32),
        ("mig_uuid", ctypes.c_int32),
    ]

    def moved(self, h2d: int, d2h: int) -> None:
        self.rx, self.tx = self.rx + h2d, self.tx + d2h


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Loaded under the name by which `pynvml` asks for it: the loader then looks no further."""
    built = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-Wl,-soname,libnvidia-ml.so.1", "-o", str(built), str(SOURCE)], check=True)
    return ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)


@pytest.fixture
def stub(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """64-bit counters that have shown it; GPM not supported."""
    # None would make `pynvml` load the library again, and on a host with a driver it would load the real one.
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    found = Stub.in_dll(library, "stub")
    ctypes.memset(ctypes.addressof(found), 0, ctypes.sizeof(found))
    found.value_type, found.tx, found.rx = U64, 2**40, 2**40
    yield found
    assert (found.initialised, found.samples) == (0, 0), "what was opened is closed"


@pytest.fixture
def gpu(stub: Stub) -> Iterator[Gpu]:
    found = open_gpu(UUID)
    assert found is not None
    yield found
    found.close()


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(1e-3, 0.066)), min_size=1, max_size=20))
def test_a_counter_of_32_bits_loses_nothing_when_it_wraps(steps: list[tuple[int, float]]) -> None:
    counter, now, total = WrappingCounter(32), 0.0, 2**32 - 5
    assert counter.bytes_since_last(now, total) is None
    for moved, pause in steps:
        now, total = now + pause, total + moved
        assert counter.bytes_since_last(now, total % 2**32) == moved


def test_a_pause_in_which_it_may_wrap_twice_is_a_gap() -> None:
    counter, longest = WrappingCounter(32), 2**32 / MAX_LINK_BYTES_PER_SECOND
    assert longest > WRAP_PERIOD_SECONDS
    counter.bytes_since_last(0.0, 0)
    assert counter.bytes_since_last(1.001 * longest, 7) is None
    assert counter.bytes_since_last(1.001 * longest + 0.01, 9) == 2, "what follows is known again"


def test_a_counter_of_64_bits_that_goes_back_was_begun_anew() -> None:
    counter = WrappingCounter(64)
    counter.bytes_since_last(0.0, 2**40)
    assert counter.bytes_since_last(100.0, 5) is None
    assert counter.bytes_since_last(200.0, 25) == 20


def test_64_bits_are_believed_when_a_value_has_needed_them() -> None:
    counter = WrappingCounter(32)
    counter.bytes_since_last(0.0, 2**32 - 10)
    assert counter.bytes_since_last(100.0, 2**32 + 5) == 15, "nothing has wrapped, however long the pause was"
    assert counter.bits == 64
    assert counter.bytes_since_last(200.0, 2**33) == 2**32 - 5


def test_counters_that_wrap_at_32_bits_behind_a_type_of_64_lose_nothing(stub: Stub) -> None:
    stub.narrow, stub.rx, stub.tx = 1, 2**32 - 100, 7
    gpu = open_gpu(UUID)
    assert gpu is not None
    source = gpu.pcie
    assert source is not None
    assert (source.name, source.period_seconds) == ("fields", WRAP_PERIOD_SECONDS)
    source.read(0.0)
    for i in range(1, 5):
        stub.moved(h2d=3 * 2**30, d2h=50)
        found = source.read(i * WRAP_PERIOD_SECONDS)
        assert (found.nbytes, found.gap) == ({"h2d": 3 * 2**30, "d2h": 50}, False)
    assert source.read(4 * WRAP_PERIOD_SECONDS + 1.0).gap, "after a second nobody knows how often it wrapped"
    gpu.close()


def test_young_counters_of_64_bits_are_read_less_often_when_they_have_shown_it(stub: Stub) -> None:
    stub.rx, stub.tx = 2**32 - 100, 7
    gpu = open_gpu(UUID)
    assert gpu is not None
    source = gpu.pcie
    assert source is not None
    assert source.period_seconds == WRAP_PERIOD_SECONDS
    source.read(0.0)
    stub.moved(h2d=200, d2h=1)
    found = source.read(0.04)
    assert (found.nbytes, found.gap) == ({"h2d": 200, "d2h": 1}, False)
    assert source.period_seconds == PERIOD_SECONDS
    stub.moved(h2d=2**36, d2h=2**36)
    assert source.read(1.04).nbytes == {"h2d": 2**36, "d2h": 2**36}
    gpu.close()


def test_young_counters_of_64_bits_give_way_to_gpm(stub: Stub) -> None:
    stub.rx, stub.tx, stub.gpm_supported = 100, 100, 1
    gpu = open_gpu(UUID)
    assert gpu is not None
    assert gpu.pcie is not None
    assert gpu.pcie.name == "gpm"
    gpu.close()


@pytest.mark.parametrize("field", ["mig_mode", "mig_uuid"])
def test_a_part_of_a_gpu_says_why_it_has_no_figures(stub: Stub, caplog: pytest.LogCaptureFixture, field: str) -> None:
    """CUDA names a part by the whole GPU's UUID or by its own, as versions differ."""
    setattr(stub, field, 1)
    assert open_gpu(UUID) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "MIG" in record.getMessage()
    assert "utilization and PCIe metrics are absent" in record.getMessage()


def test_a_gpu_that_cannot_be_divided_has_figures(stub: Stub) -> None:
    stub.mig_mode = -1
    gpu = open_gpu(UUID)
    assert gpu is not None
    gpu.close()


def test_byte_counters_are_read_by_direction(stub: Stub, gpu: Gpu) -> None:
    source = gpu.pcie
    assert source is not None
    assert (source.name, source.period_seconds) == ("fields", PERIOD_SECONDS)
    assert source.read(0.0).nbytes == {}
    stub.moved(h2d=6000, d2h=2000)
    found = source.read(2.0)
    assert found.nbytes == {"h2d": 6000, "d2h": 2000}
    assert found.bytes_per_second == {"h2d": 3000.0, "d2h": 1000.0}
    assert not found.gap


@pytest.mark.parametrize(
    ("bits", "fields", "gpm", "throughput", "chosen"),
    [
        (U64, 0, 1, 0, "fields"),
        (U32, 0, 1, 0, "gpm"),
        (U32, 0, 0, 0, "fields"),
        (U64, NO, 1, 0, "gpm"),
        (DOUBLE, 0, 0, 0, "throughput"),
        (U64, pynvml.NVML_ERROR_NO_PERMISSION, 0, 0, "throughput"),
        (U64, NO, 0, NO, None),
    ],
)
def test_the_best_source_is_taken(
    stub: Stub, bits: int, fields: int, gpm: int, throughput: int, chosen: str | None
) -> None:
    stub.value_type, stub.fields, stub.gpm_supported, stub.throughput = bits, fields, gpm, throughput
    found = open_gpu(UUID)
    assert found is not None
    assert (found.pcie.name if found.pcie is not None else None) == chosen
    found.close()


def test_mean_speeds_of_gpm_add_up_to_bytes(stub: Stub) -> None:
    stub.value_type, stub.gpm_supported, stub.rx_mib, stub.tx_mib = U32, 1, 8.0, 2.0
    gpu = open_gpu(UUID)
    assert gpu is not None
    assert gpu.pcie is not None
    assert gpu.pcie.read(0.0).nbytes == {}
    found = gpu.pcie.read(0.5)
    assert found.nbytes == {"h2d": 4 * MIB, "d2h": MIB}
    assert found.bytes_per_second == {"h2d": 8.0 * MIB, "d2h": 2.0 * MIB}
    gpu.close()


def test_samples_of_20_ms_give_a_speed_and_no_sum(stub: Stub) -> None:
    stub.fields, stub.rx_mib, stub.tx_mib = NO, 3.0, 5.0
    gpu = open_gpu(UUID)
    assert gpu is not None
    sampler = GpuSampler(lambda: gpu, dict)
    sampler.sample(gpu, 0.0)
    assert sampler.figures.source == "throughput"
    assert sampler.figures.pcie_bytes_per_second == {"h2d": 3.0 * MIB, "d2h": 5.0 * MIB}
    assert (sampler.figures.pcie_bytes, sampler.figures.discrepancy) == ({}, {})
    gpu.close()


def test_what_tidegate_did_not_count_is_published(stub: Stub, gpu: Gpu) -> None:
    counted = {"h2d": 0, "d2h": 0}
    sampler = GpuSampler(lambda: gpu, lambda: dict(counted))
    sampler.sample(gpu, 0.0)
    sampler.sample(gpu, 1.0)
    stub.moved(h2d=100 * MIB, d2h=40 * MIB)
    counted |= {"h2d": 75 * MIB, "d2h": 40 * MIB}
    sampler.sample(gpu, 2.0)
    assert sampler.figures.discrepancy == {}, "not before something is compared"
    sampler.sample(gpu, 2.0 + COMPARE_SECONDS)
    assert sampler.figures.discrepancy == {"h2d": 0.25, "d2h": 0.0}
    assert sampler.figures.pcie_bytes == {"h2d": 100 * MIB, "d2h": 40 * MIB}


def test_nothing_is_compared_across_a_gap(stub: Stub) -> None:
    stub.value_type = U32
    gpu = open_gpu(UUID)
    assert gpu is not None
    sampler = GpuSampler(lambda: gpu, lambda: {"h2d": 0, "d2h": 0})
    now = 0.0
    for _ in range(300):
        now += WRAP_PERIOD_SECONDS
        stub.moved(h2d=MIB, d2h=MIB)
        sampler.sample(gpu, now)
    assert sampler.figures.discrepancy == {"h2d": 1.0, "d2h": 1.0}
    sampler.sample(gpu, now + 1.0)
    assert sampler.figures.discrepancy == {}
    assert sampler.figures.pcie_bytes == {"h2d": 299 * MIB, "d2h": 299 * MIB}
    gpu.close()


def test_utilization_is_a_share_and_absent_where_it_is_not_supported(stub: Stub, gpu: Gpu) -> None:
    stub.busy_percent = 37
    assert gpu.utilization_ratio() == 0.37
    stub.utilization = NO
    assert gpu.utilization_ratio() is None
    sampler = GpuSampler(lambda: gpu, dict)
    sampler.sample(gpu, 0.0)
    assert sampler.figures.utilization_ratio is None


@pytest.mark.parametrize(
    ("call", "code", "sentence"),
    [
        ("init", pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"),
        ("init", pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"),
        ("handle", pynvml.NVML_ERROR_NOT_FOUND, "Not Found"),
        ("handle", pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"),
    ],
)
def test_a_gpu_that_nvml_does_not_show_is_no_error(
    stub: Stub, caplog: pytest.LogCaptureFixture, call: str, code: int, sentence: str
) -> None:
    caplog.set_level(logging.INFO, "tidegate.gpu")
    setattr(stub, call, code)
    assert open_gpu(UUID) is None
    assert sentence in caplog.text
    assert UUID in caplog.text


def test_a_gpu_that_is_lost_has_no_figures_any_more(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    stub.value_type = U32
    gpu = open_gpu(UUID)
    assert gpu is not None
    sampler = GpuSampler(lambda: gpu, lambda: {"h2d": 0, "d2h": 0})
    sampler.start()
    until(lambda: sampler.figures.source, "a sample")
    stub.fields = pynvml.NVML_ERROR_GPU_IS_LOST
    until(lambda: sampler.figures == GpuFigures(), "the end of its figures")
    sampler.close()
    assert "are absent from now on: GPU is lost" in caplog.text


def test_a_gpu_that_cannot_be_opened_is_told_and_ends_nothing_else(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever NVML raises; and it is shut down again, which `stub` holds against the library."""

    def broken(*_: object) -> None:
        raise UnicodeDecodeError("utf-8", b"", 0, 1, "what an old driver sends")

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", broken)
    sampler = GpuSampler(lambda: open_gpu(UUID), dict)
    sampler.start()
    sampler.close()
    assert "are absent from now on: 'utf-8'" in caplog.text


def test_a_watch_that_cannot_begin_serves_nothing(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such GPU")

    training, port = Training(), free_port()
    monkeypatch.setattr(rank_metrics, "_sampler", broken)
    with training.optimizer as optimizer:
        with pytest.raises(RuntimeError, match="no such GPU"):
            tidegate.attach(optimizer, training.model, run="gpu", metrics_port=port)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False)


def test_without_the_library_there_are_no_figures() -> None:
    """In a process that has not loaded ours; where a driver is installed it does not know such a GPU."""
    code = f"from tidegate.agent.telemetry.nvml import open_gpu; print(open_gpu({UUID!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_a_rank_on_a_gpu_exports_what_nvml_says_and_any_other_nothing(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer is one of the emulated device; the watch is told that its parameters are on a GPU."""
    training = Training()
    real = training.optimizer
    on_gpu = SimpleNamespace(
        device=SimpleNamespace(kind="cuda"),
        param_groups=[{"params": [SimpleNamespace(device=torch.device("cuda", 3))]}],
    )
    asked: list[object] = []

    def properties(device: object) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(uuid=UUID.removeprefix("GPU-"), name="a GPU")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    stub.busy_percent = 25
    with real, tidegate.attach(real, training.model, run="gpu") as attachment:
        training.step()
        url = f"http://{attachment.metrics_address}/metrics"
        assert "tidegate_gpu" not in httpx.get(url, trust_env=False).text
        assert rank_metrics._sampler(real, attachment.recorder) is None
        sampler = attachment._metrics._sampler = rank_metrics._sampler(on_gpu, attachment.recorder)  # type: ignore[arg-type]
        assert sampler is not None
        until(lambda: sampler.figures.source, "a sample")
        stub.moved(h2d=7, d2h=5)
        until(lambda: sampler.figures.pcie_bytes.get("h2d"), "another")
        text = httpx.get(url, trust_env=False).text
        assert 'tidegate_gpu_pcie_bytes_total{direction="h2d",source="fields"} 7.0' in text
        assert "tidegate_gpu_utilization_ratio 0.25" in text
        assert 'tidegate_agent_overhead_seconds_total{part="sampler"}' in text
    assert asked == [torch.device("cuda", 3)]
