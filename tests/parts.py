"""Which files of tests belong to which part of Tidegate. `make test-PART` runs those of one part.

`python -m tests.parts engine` prints the files of a part. Each file belongs to one part, `test_layers.py` checks it.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent

PARTS: dict[str, tuple[str, ...]] = {
    "plan": (
        "plan/test_*.py", "test_analysis.py", "test_knobs.py", "test_trace.py", "test_verdict.py",
    ),
    "model": (
        "model/test_*.py", "test_cli_plan.py", "test_papers_bench.py", "test_prediction_bench.py",
        "test_stride_benches.py", "agent/test_calibrate.py", "agent/test_tuned_ranks.py", "agent/test_tuning.py",
    ),
    "kernels": ("kernels/test_*.py",),
    "engine": (
        "agent/test_accumulation.py", "agent/test_attached_models.py", "agent/test_awkward.py",
        "agent/test_buffers.py", "agent/test_clock.py", "agent/test_closing.py", "agent/test_compiled_step.py",
        "agent/test_cuda*.py",
        "agent/test_device_life.py",
        "agent/test_emulated.py", "agent/test_exactness.py", "agent/test_executor.py", "agent/test_fruitless.py",
        "agent/test_gradients.py", "agent/test_replaced_gradients.py",
        "agent/test_gpu_kernels.py", "agent/test_interrupts.py", "agent/test_lanes_ahead.py",
        "agent/test_messages.py", "agent/test_moved.py", "agent/test_process_end.py",
        "agent/test_optimizer.py", "agent/test_overlap.py", "agent/test_pinned.py",
        "agent/test_random_draws.py", "agent/test_runs_ahead.py",
        "agent/test_regrouped.py", "agent/test_settings.py", "agent/test_shown_state.py", "agent/test_small_gpt.py",
        "agent/test_taken_over.py",
        "agent/test_torch_calls.py", "agent/test_torch_ways.py", "agent/test_vector_clocks.py", "gpu/test_*.py",
        "test_gpu_*.py",
    ),
    "storage": (
        "agent/tiers/test_*.py", "agent/test_pace.py", "agent/test_path_knobs.py", "agent/test_path_speeds.py",
        "agent/test_tiered_exactness.py", "test_doctor_checkpoints.py", "test_doctor_paths.py",
    ),
    "telemetry": (
        "agent/test_delivery.py", "agent/test_exposition.py", "agent/test_gpu_telemetry.py", "agent/test_meter.py",
        "agent/test_path_telemetry.py", "agent/test_prometheus_bytes.py", "agent/test_recent.py",
        "agent/test_recorded_run.py", "agent/test_telemetry.py", "agent/test_exporter.py", "test_catalogue.py",
        "test_logs.py", "test_promise.py",
    ),
    "daemon": (
        "daemon/test_*.py", "agent/test_campaign_daemons.py", "agent/test_link.py",
        "agent/test_hostile_daemon.py", "agent/test_restarts.py",
        "agent/test_seats.py", "agent/test_steps_told.py", "agent/test_two_hosts.py", "test_client.py",
        "test_streams.py",
    ),
    "dashboard": ("dashboard/test_*.py",),
    "integrations": (
        "agent/test_accelerate.py", "agent/test_ddp.py", "agent/test_deepspeed.py", "agent/test_deepspeed_losses.py",
        "agent/test_deepspeed_settings.py", "agent/test_fsdp.py", "agent/test_huggingface.py",
        "agent/test_lightning*.py", "agent/test_ranks.py", "agent/test_torchtitan.py",
        "conformance/test_*.py", "test_examples.py",
    ),
    "operation": (
        "alerts/test_*.py", "deployment/test_*.py", "grafana/test_*.py", "test_cli.py", "test_demo*.py",
        "test_docs.py", "test_doctor_gpu.py", "test_layers.py", "test_packaging.py", "test_public_interface.py",
    ),
}  # fmt: skip
"""File names and patterns below `tests/`."""

LONGEST = (
    "agent/test_deepspeed.py", "test_examples.py", "test_demo.py", "deployment/test_services.py", "test_gpu_bench.py",
    "agent/test_exactness.py", "agent/tiers/test_faults.py", "test_packaging.py", "dashboard/test_acceptance.py",
    "grafana/test_dashboards.py", "plan/test_verify_tiers.py", "alerts/test_scenario.py", "kernels/test_triton.py",
    "agent/test_cuda_order.py", "agent/test_tiered_exactness.py", "agent/test_overlap.py", "agent/test_fsdp.py",
    "agent/test_two_hosts.py", "daemon/test_openapi.py", "model/test_choose.py", "agent/tiers/test_kill.py",
    "agent/test_path_knobs.py", "agent/test_ddp.py", "agent/test_link.py", "test_promise.py",
    "agent/test_hostile_daemon.py",
    "dashboard/test_browser.py", "test_cli.py", "kernels/test_other_cpus.py", "agent/tiers/test_object_path.py",
    "plan/test_verify.py", "agent/test_tuned_ranks.py", "dashboard/test_tune.py", "dashboard/test_page.py",
    "kernels/test_direct_io.py", "agent/tiers/test_background.py",
)  # fmt: skip
"""Files of tests that take longest, in about that order: pytest begins with them."""


def files(part: str) -> list[Path]:
    """The part's files of tests, absolute and sorted; ValueError for a part that is none."""
    if part not in PARTS:
        raise ValueError(f"{part!r} is no part: there are {', '.join(PARTS)}")
    return sorted(path for pattern in PARTS[part] for path in TESTS.glob(pattern))


if __name__ == "__main__":
    for part in sys.argv[1:]:
        print(*(path.relative_to(TESTS.parent) for path in files(part)))
