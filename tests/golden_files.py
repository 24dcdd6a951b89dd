"""Golden numbers: what they were recorded on, and when numbers of now agree with them.

The bits of a training depend on the matmul kernels that the processor selects, so recorded numbers carry a key of all
that decides it. On the same key the bits must be equal; elsewhere each number must lie within ``TOLERANCE`` of what was
recorded, relative to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from narrowgauge.spec.processor import instruction_sets

CURVES = Path(__file__).parent / "golden" / "curves.json"
TOLERANCE = 1e-3
"""Relative difference allowed between machines."""

# The first that a processor has names its level: the matmul kernels of oneDNN, MKL and ARM's library are chosen by these.
_LEVELS = (
    "amx_bf16", "avx512_fp16", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2", "sve2", "sve", "bf16", "asimd",
)  # fmt: skip
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "NARROWGAUGE_CPU")

Curves = Mapping[str, Sequence[float]]
"""Losses by name."""


def machine_key() -> str:
    """What bits depend on: the processor's maker and level, variables that limit it, versions of PyTorch and transformers."""
    import torch  # here, because the process that distributes tests over workers needs none of it
    import transformers

    sets = instruction_sets()
    level = next((name for name in _LEVELS if name in sets), "baseline")
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if os.environ.get(name)]
    parts = [f"{platform.machine()} {_maker()} {level}", *limits, f"ATen {torch.backends.cpu.get_cpu_capability()}"]
    return ", ".join([*parts, f"torch {torch.__version__}", f"transformers {transformers.__version__}"])


def _maker() -> str:
    """Who made the processor: MKL selects other kernels on those of others."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    found = re.search(r"^(?:vendor_id|CPU implementer)\s*:\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else platform.system()


def digest(folder: Path) -> str:
    """Of the names, dtypes, shapes and bytes of all tensors in a folder's safetensors files."""
    import torch
    from safetensors.torch import load_file

    state = hashlib.blake2b(digest_size=16)
    tensors = {
        name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def deviation(recorded: Sequence[float], found: Sequence[float]) -> float:
    """The largest difference between two curves, relative to what was recorded; infinite where one is longer or not finite.

    >>> deviation([4.0, 2.0], [4.0, 2.002])
    0.001
    """
    if len(recorded) != len(found):
        return float("inf")
    differences = [abs(now - before) / abs(before) for before, now in zip(recorded, found, strict=True)]
    return max((d if d == d else float("inf") for d in differences), default=0.0)


def read_curves(path: Path) -> dict[str, dict[str, list[float]]]:
    """Curves by machine key and name; the file holds them as hexadecimal floats, a line each."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {
        key: {name: [float.fromhex(x) for x in text.split()] for name, text in of.items()} for key, of in table.items()
    }


def check(name: str, found: Sequence[float], recorded: Mapping[str, Curves], key: str) -> str:
    """Compare a curve with those recorded: with the one of the same key bit for bit, else with all within the tolerance.

    Args:
        name: of the curve.
        found: the numbers of now.
        recorded: curves by machine key.
        key: of this machine.
    Returns:
        What is wrong, in a sentence; empty where nothing is.
    """
    curves = {other: of[name] for other, of in recorded.items() if name in of}
    if not curves:
        return f"no curve of '{name}' is recorded"
    if key in curves:
        moved = difference(curves[key], found)
        return moved and f"'{name}' gives other bits than were recorded on '{key}': {moved}"
    for other, curve in curves.items():
        if (moved_by := deviation(curve, found)) > TOLERANCE:
            return f"'{name}' is {moved_by:.1e} off what was recorded on '{other}', and {TOLERANCE:g} is allowed"
    return ""


def difference(recorded: Sequence[float], found: Sequence[float]) -> str:
    """From which step on two curves differ and by how much, in words; empty where all bits are the same."""
    if len(recorded) == len(found) and all(a == b for a, b in zip(recorded, found, strict=True)):
        return ""
    equal = (k for k, (a, b) in enumerate(zip(recorded, found, strict=False)) if a != b)
    step = next(equal, min(len(recorded), len(found))) + 1
    return f"from step {step} on, by up to {deviation(recorded, found):.1e} ({recorded[-1]:.6f} → {found[-1]:.6f})"


def update_curves(path: Path, found: Sequence[tuple[str, str, Sequence[str]]]) -> list[str]:
    """Write curves anew. One that moved is forgotten on all other machines, where it must be recorded again.

    Args:
        path: the file.
        found: machine key, name and hexadecimal losses of each.
    Returns:
        What moved, a line each after a line that counts.
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
            lines.append(f"{name}: {moved}" + (f"; forgotten on {len(others)} other machines" if others else ""))
        else:
            same += 1
    table = {
        key: {name: " ".join(loss.hex() for loss in curve) for name, curve in sorted(of.items())}
        for key, of in sorted(recorded.items())
    }
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return [f"{path.name}: {same} curves with the same bits, {new} new, {len(lines)} moved", *lines]
