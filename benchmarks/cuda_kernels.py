"""What a step costs on a GPU, computed from the machine code of its kernels: no GPU is needed, and none is timed.

For each storage under AdamW: launches, bytes and instructions of a parameter, and for each chip how long memory and the issue
of instructions would take at their published rates; the larger one bounds the step. A chip issues as many instructions for single
threads as half of its float32 rate, which counts a multiply-add as two operations.

Usage: ``./dev bench cuda_kernels [STORAGE ...]``; it needs Triton (``pip install -e '.[cuda-proof]'``), 15 s a storage and chip.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cuda.lowering import Lowered, lowered
from narrowgauge.optim import codec
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.storages import STORAGES, VISIBLE, Storage

DEVICES = {"sm_90": "H100-SXM5-80GB", "sm_100": "B200-SXM-180GB"}


def bytes_moved(storage: Storage) -> float:
    """Bytes of a parameter that a step reads and writes: the gradient once, everything else twice."""
    visible = VISIBLE[storage.visible][0] / 8
    return 3 * visible + 2 * (storage.bytes_per_param - 2 * visible)


def instructions(found: Lowered, storage: Storage) -> float:
    """Instructions of a parameter: of a thread, over the parameters that it steps."""
    total = 0.0
    for kernel in found.kernels.values():
        words = kernel.config["XBLOCK"] / (32 * kernel.num_warps)
        if words >= 1:  # not what prepares a constant in one block
            total += kernel.instructions / (words * codec.num_lanes(storage))
    return total


def row(name: str, storage: Storage) -> list[str]:
    found = {chip: lowered(chip, f"step adamw {name} wide") for chip in DEVICES}
    kernels = found["sm_90"].kernels.values()
    cells = [f"`{name}`", str(len(kernels)), f"{bytes_moved(storage):g}", str(max(k.registers for k in kernels))]
    for chip, device in DEVICES.items():
        per_param, described = instructions(found[chip], storage), CHIPS[device]
        memory = bytes_moved(storage) / described.bandwidth_gb_per_second * 1e3
        issue = per_param / (described.peak_tflops["float32"] / 2)
        cells += [f"{per_param:.0f}", f"{memory:.2f}", f"{issue:.2f}", "memory" if memory >= issue else "issue"]
    return cells


def main(names: Sequence[str]) -> None:
    if find_spec("triton") is None:
        sys.exit("cuda_kernels: Triton is not installed: pip install -e '.[cuda-proof]'")
    heads = ["storage", "kernels", "bytes", "registers"]
    for device in DEVICES.values():
        short = device.partition("-")[0]
        heads += [f"{short} instructions", "memory ps", "issue ps", "bound by"]
    print(f"| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
    for name in names or STORAGES:
        print(f"| {' | '.join(row(name, STORAGES[name]))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
