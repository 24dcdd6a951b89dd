"""Memory that no formula gives: of the driver, of libraries, and what the allocator cannot use; as intervals."""

from __future__ import annotations

from collections.abc import Mapping

from narrowgauge.planner.terms import Term

FIXED: dict[str, tuple[float, float, float]] = {
    "context": (0.7e9, 0.4e9, 1.0e9),
    "communication buffers": (1.0e9, 0.4e9, 2.0e9),
    "workspaces": (0.1e9, 0.03e9, 0.3e9),
    "fragmentation": (0.03, 0.0, 0.25),
}
"""Memory that no formula gives, ``(usual, least, most)`` in bytes: of the driver, of collectives where there are several ranks,
of libraries; and what the allocator cannot use, as a share of all that changes during a step. It reserves up to a quarter
more than it hands out in published runs (benchmarks/planned_peaks.py), where the chip has room for it."""
_FIXED_SOURCE = "commonly observed: CUDA contexts, NCCL's channels, cuBLAS's workspace; no publication"


def overhead_terms(dynamic_bytes: float, num_ranks: int, fixed: Mapping[str, float]) -> list[Term]:
    """The terms of overhead.

    Args:
        dynamic_bytes: what is allocated and freed during a step, which can be fragmented.
        num_ranks: of the job; one has no communication buffers.
        fixed: what is known, by name: bytes, or for fragmentation a share.
    """
    found = []
    for name, (usual, least, most) in FIXED.items():
        if name == "communication buffers" and num_ranks == 1:
            continue
        is_share = name == "fragmentation"
        if name in fixed:
            usual = least = most = fixed[name]
        factor = dynamic_bytes if is_share else 1.0
        formula = f"{usual:.0%} of {dynamic_bytes / 1e9:.3g} GB that change" if is_share else f"{usual / 1e9:g} GB"
        source = "given" if name in fixed else _FIXED_SOURCE
        found.append(Term("overhead", name, usual * factor, formula, source, least * factor, most * factor))
    return found
