"""Golden curves: on which machine they were recorded, and how a new curve is compared with them.

The bits of a training run depend on the matmul kernels selected for the processor, so each recorded curve has a key that
names the processor and the versions. On the same key the bits must be equal; on any other machine the relative difference
of each loss must not exceed :func:`tolerance_of` the recipe.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from narrowgauge.machine import instruction_sets

CURVES = Path(__file__).parent / "golden" / "curves.json"
TOLERANCE = 1e-3
"""Relative difference allowed between machines."""
_COARSE = ("weight8", "nvfp4", "mxfp4")
"""Weights or operands of so few values that a last digit of a sum may move one by an eighth or more: twice as much is allowed."""


def tolerance_of(name: str) -> float:
    """The relative difference that a recipe's losses may have between machines."""
    return 2 * TOLERANCE if any(part in name for part in _COARSE) else TOLERANCE


# A processor's level is the first of these that it has; oneDNN, MKL and the ARM libraries select their matmul kernels by them.
_LEVELS = (
    "amx_bf16", "avx512_fp16", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2", "sve2", "sve", "bf16", "asimd",
)  # fmt: skip
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")

Curves = Mapping[str, Sequence[float]]
"""Losses by name."""


def machine_key() -> str:
    """What the bits depend on: processor vendor and level, variables that limit it, versions of PyTorch and transformers."""
    import torch  # imported late: the process that distributes tests to workers needs none of it
    import transformers

    sets = instruction_sets()
    level = next((name for name in _LEVELS if name in sets), "baseline")
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if os.environ.get(name)]
    parts = [f"{platform.machine()} {_vendor()} {level}", *limits, f"ATen {torch.backends.cpu.get_cpu_capability()}"]
    return ", ".join([*parts, f"torch {torch.__version__}", f"transformers {transformers.__version__}"])


def _vendor() -> str:
    """The processor's vendor: MKL selects its kernels by it too."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    found = re.search(r"^(?:vendor_id|CPU implementer)\s*:\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else platform.system()


def deviation(recorded: Sequence[float], found: Sequence[float]) -> float:
    """The largest relative difference of two curves; infinite where the lengths differ or a loss is not finite.

    >>> deviation([4.0, 2.0], [4.0, 2.5])
    0.25
    """
    if len(recorded) != len(found):
        return float("inf")
    differences = [abs(now - before) / abs(before) for before, now in zip(recorded, found, strict=True)]
    return max((d if d == d else float("inf") for d in differences), default=0.0)


def read_curves(path: Path) -> dict[str, dict[str, list[float]]]:
    """Curves by machine key and name; the file holds one curve per line, as hexadecimal floats."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {
        key: {name: [float.fromhex(x) for x in text.split()] for name, text in of.items()} for key, of in table.items()
    }


def check(name: str, found: Sequence[float], recorded: Mapping[str, Curves], key: str) -> str:
    """Compare a curve with the recorded ones: bit for bit with that of the same key, otherwise with all, within the tolerance.

    Args:
        name: of the curve.
        found: the new curve.
        recorded: curves by machine key.
        key: of this machine.
    Returns:
        The fault, in a sentence; empty if there is none.
    """
    curves = {other: of[name] for other, of in recorded.items() if name in of}
    if not curves:
        return f"no curve of '{name}' is recorded"
    if key in curves:
        moved = difference(curves[key], found)
        return moved and f"'{name}' gives other bits than were recorded on '{key}': {moved}"
    for other, curve in curves.items():
        if (moved_by := deviation(curve, found)) > (allowed := tolerance_of(name)):
            return f"'{name}' is {moved_by:.1e} off what was recorded on '{other}', and {allowed:g} is allowed"
    return ""


def difference(recorded: Sequence[float], found: Sequence[float]) -> str:
    """The first step in which two curves differ, and by how much, in words; empty if all bits are equal."""
    if len(recorded) == len(found) and all(a == b for a, b in zip(recorded, found, strict=True)):
        return ""
    equal = (k for k, (a, b) in enumerate(zip(recorded, found, strict=False)) if a != b)
    step = next(equal, min(len(recorded), len(found))) + 1
    return f"from step {step} on, by up to {deviation(recorded, found):.1e} ({recorded[-1]:.6f} → {found[-1]:.6f})"


def update_curves(path: Path, found: Sequence[tuple[str, str, Sequence[str]]]) -> list[str]:
    """Record curves. A curve that moved is removed from all other keys: record it there again. Keys without curves are, too.

    Args:
        path: the file.
        found: machine key, name and hexadecimal losses of each curve.
    Returns:
        A line of counts, and a line per curve that moved.
    """
    recorded, lines, new, same = read_curves(path), [], 0, 0
    for key, name, losses in sorted(found):
        curve = [float.fromhex(loss) for loss in losses]
        before = recorded.setdefault(key, {}).get(name)
        recorded[key][name] = curve
        if before is None:
            new += 1
        elif moved := difference(before, curve):
            others = [of for other, of in recorded.items() if other != key and of.pop(name, None)]
            lines.append(f"{name}: {moved}" + (f"; removed from {len(others)} other keys" if others else ""))
        else:
            same += 1
    table = {
        key: {name: " ".join(loss.hex() for loss in curve) for name, curve in sorted(of.items())}
        for key, of in sorted(recorded.items())
        if of
    }
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return [f"{path.name}: {same} curves with the same bits, {new} new, {len(lines)} moved", *lines]
