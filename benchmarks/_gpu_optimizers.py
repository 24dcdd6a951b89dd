"""The optimizer's part of ``gpu.py``: every bit that a step leaves, and how fast it is.

Claim: after steps with clipping, audits, a skipped step and micro-batches, weights, states and the norm that the compiled kernels
leave on the device have the bits of the definition run eagerly on a CPU: for every storage, elementwise rule and sum of
micro-batches. Tensors have even and odd lengths, and some begin at an odd element, so that a launch for many tensors, the
launches beside it, norms by rows and what is left of the rows are all taken. Matrix rules, whose products differ, come near.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _gpu_setting import Setting, Tables
from optimizer_step import OPTIONS, Case, Shapes, fused, model_shapes, ours, peer_contender, small_shapes
from peers import CUDA_PEERS, PEERS, reason
from stall import Stall
from stall import ours as stall_trainee
from timing import NOT_INSTALLED, Contender, Row, measure, peer_version
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge._torch.many_tensors import ManyTensors
from narrowgauge.optim import compilation
from narrowgauge.spec.storages import STORAGES, VISIBLE, Storage
from narrowgauge.spec.sums import ACCUMULATIONS

SHAPES: Shapes = ((130, 66), (65, 67), (5, 1), (300, 300), (1, 1), (512, 1024), (64,), (33,), *((33, 16), (7, 9)) * 6)
"""Even and odd lengths, one element, in a bucket and alone, one that is audited in turns, and many small ones."""
MATRICES: Shapes = ((130, 66), (66, 130), (64, 64))
NEAR = 0.05
"""How far a matrix rule's weights may be from a CPU's, as a share of how far they have moved since the first step."""
SKIPPED, MICRO_BATCHES = 3, 3
"""The step that has an infinite gradient; the micro-batches of a step that has several."""
STALL_BOUNDS = {
    **dict.fromkeys(("float64/float64", "master64", "float16/master64"), (0.0, 0.002)),
    **dict.fromkeys(("float32", "master", "exact"), (0.0, 0.002)),
    "split": (0.0, 0.01),
    "word": (0.0, 0.10),
    "split8": (0.0, 0.12),
    **dict.fromkeys(("compact", "float32-states8"), (0.0, 0.15)),
    **dict.fromkeys(("kahan", "collage-light", "collage-plus"), (0.0, 0.08)),
    **dict.fromkeys(("float8/collage-light", "float8/collage-plus"), (0.5, 1.0)),
    **dict.fromkeys(("float16/master", "float16/split"), (0.0, 0.01)),
    **dict.fromkeys(("float16/kahan", "float16/collage-light", "float16/collage-plus"), (0.0, 0.01)),
    **dict.fromkeys(("naive", "no-master", "float16/naive"), (0.9, 1.0)),
    **dict.fromkeys(("float16-throughout/naive", "scalify-float16/scaled16"), (0.9, 1.0)),
    **dict.fromkeys(("stochastic", "states8"), (0.9, 2.0)),
    "weight8": (2.0, 10.0),
}
"""Between which errors of the stall case a storage must lie: those that lose updates must be seen to lose them."""
BASELINE = "torch fused float32"


@dataclass(frozen=True)
class Kept:
    """What some steps leave: tensors on the CPU as int32 bits, and the audit's readings."""

    bits: dict[str, Tensor]
    readings: dict[str, float]


def at_odd_element(values: Tensor, device: torch.device) -> Tensor:
    """The values on a device, as a view that begins at the second element of a buffer."""
    return values.new_empty(values.numel() + 1, device=device)[1:].view(values.shape).copy_(values)


def trained(
    make: Any,
    device: torch.device,
    steps: int,
    *,
    shapes: Shapes,
    dtype: torch.dtype = torch.bfloat16,
    accumulation: str | None = None,
    compile: bool,
) -> Kept:
    """What is kept after some steps, one of them skipped; ``make`` is given the parameters and makes the optimizer.

    Every third tensor, and every second of their gradients, begins at an odd element. With an ``accumulation`` a step has
    :data:`MICRO_BATCHES`.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...], scale: float, is_odd: bool) -> Tensor:
        values = (torch.randn(shape, generator=generator) * scale).bfloat16().to(dtype)
        return at_odd_element(values, device) if is_odd else values.to(device)

    parameters = [nn.Parameter(drawn(shape, 0.02, k % 3 == 2)) for k, shape in enumerate(shapes)]
    optimizer = make(parameters, max_grad_norm=1.0, audit_every=5, compile=compile)
    sums = ng.GradientAccumulator(parameters, accumulation or "float32", compile=compile)
    for step in range(steps):
        for _ in range(MICRO_BATCHES if accumulation else 1):
            for k, (parameter, shape) in enumerate(zip(parameters, shapes, strict=True)):
                gradient = drawn(shape, 1e-2, k % 6 == 5)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            if step == SKIPPED:
                parameters[0].grad.view(-1)[0] = math.inf  # type: ignore[union-attr]
            if accumulation:
                sums.accumulate()
        if accumulation:
            sums.finish()
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
    kept = {f"{k} visible": p.detach().float() for k, p in enumerate(parameters)}
    for k, parameter in enumerate(parameters):
        names = ("weight", *(name for name in ("exp_avg", "exp_avg_sq") if name in optimizer.state[parameter]))
        kept |= {f"{k} {name}": optimizer.stored(parameter, name) for name in names}
    kept["norm"] = optimizer.grad_norm.detach().float().reshape(1)
    kept["steps"] = torch.tensor([float(optimizer.num_steps(p)) for p in parameters])
    bits = {
        name: value.cpu().clone(memory_format=torch.contiguous_format).view(torch.int32) for name, value in kept.items()
    }
    return Kept(bits, {name: reading.edq for name, reading in ng.audit(optimizer).items()})


def kernels_of(device: torch.device) -> dict[tuple[str, int, str], object]:
    """Every kernel that this process has asked for, ``None`` where one runs uncompiled: a warning says so only once."""
    return {key: run for key, run in compilation._KERNELS.items() if key[2].startswith(device.type)}


def compared(setting: Setting, make: Any, **options: Any) -> tuple[Row, Kept, Kept]:
    """The eager CPU beside the compiled device: values, those that differ, audits, and how the kernels ran."""
    before, extent = set(kernels_of(setting.device)), setting.extent
    options = {"shapes": tuple(s for s in SHAPES if math.prod(s) <= extent.largest), **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trained(make, torch.device("cpu"), extent.steps, compile=False, **options)
        found = trained(make, setting.device, extent.steps, compile=True, **options)
    differing = {name: int((expected.bits[name] != value).sum()) for name, value in found.bits.items()}
    worst = max(differing, key=lambda name: differing[name])
    new = {key: run for key, run in kernels_of(setting.device).items() if key not in before}
    uncompiled = [key[0] for key, run in new.items() if run is None]
    if uncompiled:
        setting.report.note(f"RUNS UNCOMPILED on {setting.device}: {', '.join(uncompiled)}")
    row: Row = {
        "values": sum(value.numel() for value in found.bits.values()),
        "differing": sum(differing.values()),
        "worst": worst if differing[worst] else "",
        "audit off by": _apart(expected.readings, found.readings),
        "kernels": len(new),
        "uncompiled": len(uncompiled),
        "for many tensors": sum(isinstance(run, ManyTensors) for run in new.values()),
    }
    return row, expected, found


def _apart(expected: dict[str, float], found: dict[str, float]) -> float:
    """The largest difference of two audits; their sums are added in another order."""
    both = [(value, found[name]) for name, value in expected.items()]
    return max((abs(a - b) for a, b in both if not (math.isnan(a) and math.isnan(b))), default=0.0)


def _verdict(row: Row) -> Row:
    right = not row["differing"] and not row["uncompiled"] and row["audit off by"] <= 1e-3
    return {**row, "passes": "yes" if right else "NO"}


def _adamw(storage: str) -> Any:
    return lambda parameters, **options: ng.AdamW(parameters, **OPTIONS, storage=storage, **options)


def bits_row(setting: Setting, storage: str) -> Row:
    """A storage under AdamW."""
    dtype = getattr(torch, STORAGES[storage].visible)
    return {"storage": storage, **_verdict(compared(setting, _adamw(storage), dtype=dtype)[0])}


def sums_row(setting: Setting, accumulation: str) -> Row:
    """A sum of micro-batches, under ``word``."""
    row = compared(setting, _adamw("word"), accumulation=accumulation)[0]
    return {"sums of micro-batches": accumulation, **_verdict(row)}


RULES: dict[str, dict[str, Any]] = {"Adam": {}, "SGD": {"momentum": 0.9}, "Lion": {}}
MATRIX_RULES: dict[str, dict[str, Any]] = {"Muon": {"ns_dtype": "float32"}, "Adafactor": {}, "GaLore": {"rank": 8}}


def rule_row(setting: Setting, name: str) -> Row:
    """An elementwise rule under ``word``."""
    options = {"lr": 1e-4, "storage": "word", **RULES[name]}
    row = compared(setting, lambda parameters, **own: getattr(ng, name)(parameters, **options, **own))[0]
    return {"rule": name, **_verdict(row)}


def matrix_row(setting: Setting, name: str) -> Row:
    """A matrix rule in float32, whose products are added in another order: how near it comes."""
    options = {"lr": 1e-3, "storage": "float32", **MATRIX_RULES[name]}
    rule = getattr(ng, name, None) or getattr(ng.optim, name)

    def make(parameters: Sequence[nn.Parameter], **own: Any) -> ng.Optimizer:
        made: ng.Optimizer = rule(parameters, **options, **own)
        return made

    tensors: dict[str, Any] = {"shapes": MATRICES, "dtype": torch.float32}
    row, expected, found = compared(setting, make, **tensors)
    begun = trained(make, torch.device("cpu"), 1, compile=False, **tensors)
    away = max(_share(expected, found, begun, k) for k in range(len(MATRICES)))
    return {"rule": name, "values": row["values"], "away": away, "passes": "yes" if away <= NEAR else "NO"}


def _share(expected: Kept, found: Kept, begun: Kept, k: int) -> float:
    """How far two weights are apart, as a share of how far the first has moved since its first step."""
    a, b, start = (kept.bits[f"{k} visible"].view(torch.float32) for kept in (expected, found, begun))
    return float((a - b).norm() / (a - start).norm())


def stall_row(setting: Setting, case: Stall, storage: str) -> Row:
    """The stall case, compiled."""
    trainee, optimizer = stall_trainee(case, storage, str(setting.device), compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ng.optim.UpdateLossWarning)
        error = case.error(trainee)
    low, high = STALL_BOUNDS[storage]
    return {
        "storage": storage,
        "error": error,
        "must be": f"{low} … {high}",
        "EDQ": ng.audit(optimizer)["weight"].edq,
        "passes": "yes" if low <= error <= high else "NO",
    }


def check_storages(setting: Setting) -> Tables:
    """Every storage, rule and sum of micro-batches: its bits; of storages also the stall case."""
    extent, device = setting.extent, setting.device.type.upper()
    against = f"eager CPU against compiled {device}"
    rows = setting.rows("storage", extent.storages, lambda name: bits_row(setting, name))
    yield f"storages: {against}", rows
    sums = [name for name, row in ACCUMULATIONS.items() if row.planes]
    yield f"micro-batches: {against}", setting.rows("sum", sums, lambda name: sums_row(setting, name))
    elementwise = [name for name in extent.rules if name in RULES]
    yield f"elementwise rules: {against}", setting.rows("rule", elementwise, lambda name: rule_row(setting, name))
    matrix = [name for name in extent.rules if name in MATRIX_RULES]
    rows = setting.rows("matrix rule", matrix, lambda name: matrix_row(setting, name))
    yield "matrix rules in float32: how far from a CPU's", rows
    case = Stall.make(256, 400)
    rows = setting.rows("stall", extent.storages, lambda name: stall_row(setting, case, name))
    yield f"the stall case on {device}", rows


# ── speed ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def bytes_moved(storage: Storage) -> float:
    """Bytes that one step must move per element."""
    visible = VISIBLE[storage.visible][0] / 8
    return 3 * visible + 2 * (storage.bytes_per_param - 2 * visible)


def copy_bandwidth(setting: Setting, rounds: int) -> float:
    """Bytes per second of a copy on the device, each byte counted as read and as written."""
    size = setting.extent.copy_bytes
    source, target = (torch.zeros(size // 4, device=setting.device) for _ in range(2))
    (timing,) = measure(
        [Contender("copy", lambda: target.copy_(source))], baseline="copy", rounds=rounds, wait=setting.wait
    )
    return 2 * float(size) / timing.median


def contenders(setting: Setting, shapes: Shapes) -> dict[str, tuple[Any, float | None]]:
    """What is timed beside the baseline: how it is made, and the bytes that it must move per element, if known."""
    device = str(setting.device)

    def own(storage: str, **options: Any) -> Any:
        return lambda: Contender("", ours(shapes, storage, device=device, **options).step)

    made: dict[str, tuple[Any, float | None]] = {
        f"ours {storage}": (own(storage), bytes_moved(STORAGES[storage])) for storage in setting.extent.storages
    }
    made["ours word, clipped"] = (own("word", max_grad_norm=1.0), bytes_moved(STORAGES["word"]) + 4)
    made["ours word, audited"] = (own("word", audit_every=1), None)
    for peer in (*PEERS, *CUDA_PEERS):
        made[peer.name] = (lambda peer=peer: peer_contender(peer, shapes, None, device), None)
    return made


def speed_rows(setting: Setting, case: Case, bandwidth: float, rounds: int) -> list[Row]:
    """Each contender in the same rounds as the baseline, one at a time: a GPU may hold no more. A peer may fail."""
    absent = {p.name: p.package for p in (*PEERS, *CUDA_PEERS) if peer_version(p.package) == NOT_INSTALLED}
    peers, rows = {peer.name for peer in (*PEERS, *CUDA_PEERS)}, list[Row]()
    for name, (make, size) in setting.in_time(case.title, contenders(setting, case.shapes).items()):
        if name in absent:
            rows.append({"": name, "why not": f"{absent[name]} is {NOT_INSTALLED}"})
            continue
        try:
            pair = [Contender(BASELINE, fused(case.shapes, str(setting.device)).step), make()]
            pair[1] = Contender(name, pair[1].run, pair[1].before)
            timings = measure(pair, baseline=BASELINE, rounds=rounds, warmup=3, wait=setting.wait)
        except Exception as error:  # a peer's kernels may need what is not here
            if name not in peers:
                raise
            rows.append({"": name, "why not": reason(error)})
            continue
        finally:
            pair = []
            setting.free()
        sizes: Sequence[float | None] = (bytes_moved(STORAGES["float32"]), size)
        made = [
            {**t.row(), **({} if s is None else _share_of_copy(s, s * case.num_elements / t.median / bandwidth))}
            for t, s in zip(timings, sizes, strict=True)
        ]
        rows += made[bool(rows) :]
    return rows


def _share_of_copy(size: float, share: float) -> Row:
    return {"bytes moved": size, "share of copy": share}


def time_steps(setting: Setting, rounds: int) -> None:
    """Step times against the copy and torch's fused AdamW."""
    extent, bandwidth = setting.extent, copy_bandwidth(setting, rounds)
    size = extent.copy_bytes >> 20
    setting.report.note(f"a copy of {size} MiB moves {bandwidth / 1e9:,.0f} GB/s, read and written")
    for case in (
        Case("small tensors", small_shapes(extent.num_small)),
        Case(extent.model, model_shapes(extent.model)),
    ):
        title = f"{case.title}; ratio to {BASELINE}"
        setting.report.add(title, speed_rows(setting, case, bandwidth, rounds))
