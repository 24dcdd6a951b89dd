"""What a storage really holds, and what a step needs on top of it.

Claim: the bytes per parameter that ``narrowgauge show recipes`` says are those that live tensors take, and a step needs
at most 64 MiB beyond them, whatever the model. One tensor of 33.5 M elements, gradients clipped, in a process of its own
per storage; the step is compiled, and the same again eager.

Baseline: the row's own figure, scales per row included. The process's resident memory is read from the system, its peak
is reset, one step taken, and the peak read: once for a plain step, once for an audited one. PyTorch's buffers are in it,
which ``tracemalloc`` would not see. glibc is set to map every buffer of 64 KiB on its own and to unmap it when it is
freed; otherwise memory that it keeps from earlier would hide what a step needs, or, given back, look as if it did.

Run: ``./dev bench memory [--quick]``; it needs Linux. No times are taken, so ``--rounds`` has no effect.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timing import Report, Row, parser

from narrowgauge.spec.storages import STORAGES

SHAPE, QUICK_SHAPE = (1 << 13, 1 << 12), (1 << 9, 1 << 9)
LIMIT_MIB = 64.0
WARM_STEPS = 2
"""Audited every second step, so that both kernels have been compiled and run."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": "0"}
MIB = 1 << 20


def status(field: str) -> int:
    """A figure of this process's memory in bytes: ``VmRSS`` (resident now) or ``VmHWM`` (its peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def settle() -> None:
    """Give free memory back to the system, and forget the peak so far."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def child(storage: str, shape: Sequence[int], compile: bool, num_threads: int | None) -> Row:
    """What one process measures of itself."""
    import torch

    import narrowgauge as ng

    if num_threads:
        torch.set_num_threads(num_threads)
    weight = torch.nn.Parameter(torch.empty(*shape, dtype=getattr(torch, STORAGES[storage].visible)).normal_(0, 0.02))
    weight.grad = torch.empty_like(weight).normal_(0, 1e-3)
    optimizer = ng.AdamW([weight], lr=1e-4, storage=storage, max_grad_norm=1.0, audit_every=2, compile=compile)
    for _ in range(WARM_STEPS):
        optimizer.step()
    peaks = []
    for _ in ("plain", "audited"):
        settle()
        before = status("VmRSS")
        optimizer.step()
        peaks.append((status("VmHWM") - before) / MIB)
    return {"bytes_per_param": optimizer.bytes_per_param(), "plain": peaks[0], "audited": peaks[1]}


def process(storage: str, shape: Sequence[int], compile: bool, num_threads: int | None) -> Row:
    """Run :func:`child` in a process of its own."""
    given = (storage, shape, compile, num_threads)
    command = [sys.executable, __file__, "--child", *map(json.dumps, given)]
    done = subprocess.run(command, env={**os.environ, **ALLOCATOR}, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        return {"failed": lines[-1][:90]}
    result: Row = json.loads(done.stdout.splitlines()[-1])
    return result


def row_of(storage: str, shape: Sequence[int], num_threads: int | None) -> Row:
    """Everything about one storage."""
    row = STORAGES[storage]
    stated = row.bytes_per_param + row.bytes_per_row / shape[-1]
    made: Row = {"": storage, "B/param": f"{stated:.4f}"}
    peaks: list[float] = []
    for way, compile in (("compiled", True), ("eager", False)):
        found: dict[str, Any] = process(storage, shape, compile, num_threads)
        if "failed" in found:
            return {**made, "agrees": f"{way} failed: {found['failed']}"}
        made["counted"] = f"{found['bytes_per_param']:.4f}"
        made["agrees"] = "yes" if abs(found["bytes_per_param"] - stated) < 5e-4 else "NO"
        for kind in ("plain", "audited"):
            made[f"{way}, {kind}: MiB"] = f"{found[kind]:.1f}"
            peaks.append(found[kind])
    made[f"within {LIMIT_MIB:g} MiB"] = "yes" if max(peaks) <= LIMIT_MIB else "NO"
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=1)
    flags.add_argument("--storages", nargs="+", choices=list(STORAGES), default=list(STORAGES), metavar="NAME")
    options = flags.parse_args(arguments)
    report = Report("memory", options)
    if not Path("/proc/self/clear_refs").exists():
        report.note("the system has no /proc/self/clear_refs, so nothing could be measured.")
        return report.end()
    shape = QUICK_SHAPE if options.quick else SHAPE
    rows = [row_of(storage, shape, options.threads) for storage in options.storages]
    report.add(f"bytes per parameter, and a step's peak over resident memory; {shape[0]:,} × {shape[1]:,}", rows)
    return report.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        storage, shape, compile, num_threads = map(json.loads, sys.argv[2:6])
        print(json.dumps(child(storage, shape, compile, num_threads)))
    else:
        sys.exit(main())
