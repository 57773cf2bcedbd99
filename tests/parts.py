"""Which files of tests belong to which part of Tidegate. `make test-PART` runs those of one part.

`python -m tests.parts engine` prints the files of a part. Each file belongs to one part, `test_layers.py` checks it.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent

PARTS: dict[str, tuple[str, ...]] = {
    "plan": ("knobs/**/test_*.py", "plan/**/test_*.py", "timeline/**/test_*.py"),
    "model": (
        "capacity/**/test_*.py", "simulator/**/test_*.py", "speeds/**/test_*.py", "tuner/**/test_*.py",
        "agent/calibration/**/test_*.py", "bench/test_papers.py", "bench/test_prediction.py", "bench/test_strides.py",
        "cli/test_plan.py", "test_comparison.py",
    ),
    "kernels": ("kernels/**/test_*.py", "rules/**/test_*.py"),
    "engine": (
        "agent/test_cgroups.py", "agent/test_cleanup.py", "agent/devices/**/test_*.py", "agent/engine/**/test_*.py",
        "agent/gradients/**/test_*.py", "agent/optimizer/**/test_*.py", "agent/parameters/**/test_*.py",
        "bench/test_gpu*.py", "gpu/**/test_*.py",
    ),
    "storage": (
        "agent/checkpoints/**/test_*.py", "agent/tiers/**/test_*.py", "cli/doctor/test_checkpoints.py",
        "cli/doctor/test_storage_paths.py",
    ),
    "telemetry": ("agent/telemetry/**/test_*.py", "metrics/**/test_*.py", "test_logs.py"),
    "daemon": ("agent/control/**/test_*.py", "client/**/test_*.py", "daemon/**/test_*.py"),
    "dashboard": ("dashboard/**/test_*.py",),
    "integrations": (
        "agent/test_ranks.py", "agent/integrations/**/test_*.py", "conformance/**/test_*.py", "test_examples.py",
        "test_plain_examples.py",
    ),
    "operation": (
        "alerts/**/test_*.py", "cli/test_cli.py", "cli/test_rules.py", "cli/doctor/test_gpu.py", "demo/**/test_*.py",
        "deployment/**/test_*.py", "grafana/**/test_*.py", "bench/test_results_page.py",
        "test_compile_deepspeed.py", "test_docs.py", "test_docstrings.py", "test_layers.py", "test_packaging.py",
        "test_page_blocks.py", "test_public_interface.py", "test_release.py", "test_site.py",
    ),
}  # fmt: skip
"""File names and patterns below `tests/`."""

LONGEST = (
    "agent/integrations/deepspeed/test_deepspeed.py", "test_examples.py", "test_plain_examples.py", "demo/test_demo.py",
    "deployment/test_services.py", "bench/test_gpu.py", "agent/engine/test_exactness.py",
    "agent/tiers/test_faults.py", "test_packaging.py", "dashboard/test_acceptance.py", "grafana/test_dashboards.py",
    "plan/test_verify_paths.py", "alerts/test_scenario.py", "kernels/arithmetic/test_triton.py",
    "agent/devices/test_cuda_order.py", "agent/engine/test_tiered_exactness.py",
    "agent/optimizer/test_forward_overlap.py", "agent/integrations/test_fsdp.py", "agent/control/test_two_hosts.py",
    "daemon/routes/test_openapi.py", "tuner/test_search.py", "agent/checkpoints/test_kill.py",
    "agent/control/test_path_knobs.py", "agent/integrations/test_ddp.py", "agent/control/test_daemon_link.py",
    "metrics/test_real_prometheus.py", "agent/control/test_hostile_daemon.py", "dashboard/test_browser.py",
    "cli/test_cli.py", "kernels/arithmetic/test_other_cpus.py", "agent/tiers/test_object_path.py",
    "plan/test_verify.py", "agent/control/test_tuned_ranks.py", "dashboard/pages/test_tune.py",
    "dashboard/pages/test_all_pages.py", "kernels/io/test_direct_io.py", "agent/checkpoints/test_background.py",
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
