"""The checks and benchmarks on CUDA: first that every bit is right, then how near a step comes to the memory's limit.

Claim: the kernels compiled for a GPU give the same bits as the definition run eagerly on a CPU, for every storage; the
stall case reads the same; and a step moves its bytes at nearly the rate of a plain copy. Bytes per element: the visible
weight read and written, the gradient read, every state read and written (``word`` 14, a float32 AdamW 28). Cases: a
llama-1b's tensors, and 300 small ones.

Yardstick: ``torch.optim.AdamW(fused=True)`` in float32 for the ratio, and a device-to-device copy of 1 GiB (read and
written) for the share of the bandwidth.

Run: ``./dev gpu [--quick]``. A failed check ends with status 1 and nothing is timed; without a GPU, status 2.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch
from optimizer_step import OPTIONS, Case, fused, model_shapes, ours, small_shapes
from stall import Stall
from stall import ours as stall_trainee
from timing import Contender, Report, Row, measure, parser
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import ChipError
from narrowgauge.storages import STORAGES, VISIBLE, Storage

SHAPES = ((130, 66), (65, 67), (5, 1), (300, 300), (1, 1), (512, 1024))
"""Even and odd lengths, one element, in a bucket and alone, and one that is audited in turns."""
STALL_BOUNDS = {
    **dict.fromkeys(("float32", "master", "exact"), (0.0, 0.002)),
    "split": (0.0, 0.01),
    "word": (0.0, 0.10),
    "split8": (0.0, 0.12),
    "compact": (0.0, 0.15),
    **dict.fromkeys(("kahan", "collage-light", "collage-plus"), (0.0, 0.08)),
    **dict.fromkeys(("float8/collage-light", "float8/collage-plus"), (0.5, 1.0)),
    **dict.fromkeys(("float16/master", "float16/split"), (0.0, 0.01)),
    **dict.fromkeys(("naive", "no-master"), (0.9, 1.0)),
    **dict.fromkeys(("stochastic", "states8"), (0.9, 2.0)),
}
"""Between which errors of the stall case a storage must lie: those that lose updates must be seen to lose them."""
COPY_BYTES = 1 << 30
YARDSTICK = "torch fused float32"


def require_device() -> None:
    """Stop where there is no GPU.

    Raises:
        ChipError: no CUDA device is here.
    """
    if not torch.cuda.is_available():
        raise ChipError(
            f"./dev gpu needs a CUDA device, and PyTorch {torch.__version__} finds none here.",
            "./dev test and ./dev bench check and measure the CPU.",
        )


def bytes_moved(storage: Storage) -> float:
    """Bytes that one step must move per element."""
    visible = VISIBLE[storage.visible][0] / 8
    return 3 * visible + 2 * (storage.bytes_per_param - 2 * visible)


def _trained(storage: str, device: str, steps: int) -> dict[str, Tensor]:
    """Everything that is kept after some steps with clipping and audit, on the CPU as int32 bits."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, STORAGES[storage].visible)

    def drawn(shape: tuple[int, ...], scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16().to(device, dtype)

    parameters = [nn.Parameter(drawn(shape, 0.02)) for shape in SHAPES]
    optimizer = ng.AdamW(
        parameters, **OPTIONS, storage=storage, max_grad_norm=1.0, audit_every=5, compile=device != "cpu"
    )
    for _ in range(steps):
        for parameter, shape in zip(parameters, SHAPES, strict=True):
            parameter.grad = drawn(shape, 1e-2)
        optimizer.step()
    kept = {f"{k} visible": p.detach().float() for k, p in enumerate(parameters)}
    for k, parameter in enumerate(parameters):
        kept |= {f"{k} {name}": optimizer.stored(parameter, name) for name in ("weight", "exp_avg", "exp_avg_sq")}
    if optimizer.grad_norm is not None:
        kept["norm"] = optimizer.grad_norm.detach().float().reshape(1)
    return {name: value.cpu().contiguous().view(torch.int32) for name, value in kept.items()}


def bits_row(storage: str, steps: int) -> Row:
    """How many of the kept values differ between the eager CPU and the compiled GPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected, found = _trained(storage, "cpu", steps), _trained(storage, "cuda", steps)
    uncompiled = [str(w.message) for w in caught if "uncompiled" in str(w.message)]
    differing = {name: int((expected[name] != value).sum()) for name, value in found.items()}
    worst = max(differing, key=lambda name: differing[name])
    return {
        "storage": storage,
        "values": sum(value.numel() for value in found.values()),
        "differing": sum(differing.values()),
        "worst": worst if differing[worst] else "",
        "compiled": uncompiled[0][:60] if uncompiled else "yes",
        "passes": "yes" if not uncompiled and not differing[worst] else "NO",
    }


def stall_row(storage: str, case: Stall) -> Row:
    """The stall case on the GPU, compiled."""
    trainee, optimizer = stall_trainee(case, storage, "cuda", compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ng.UpdateLossWarning)
        error = case.error(trainee)
    low, high = STALL_BOUNDS[storage]
    reading = ng.audit(optimizer)["weight"]
    return {
        "storage": storage,
        "error": error,
        "must be": f"{low} … {high}",
        "EDQ": reading.edq,
        "passes": "yes" if low <= error <= high else "NO",
    }


def check(report: Report, quick: bool) -> bool:
    """All checks of correctness; whether they pass."""
    bits = [bits_row(storage, 10 if quick else 50) for storage in STORAGES]
    report.add("bits: eager CPU against compiled CUDA", bits)
    case = Stall.make(256, 400)
    stalls = [stall_row(storage, case) for storage in STORAGES]
    report.add("the stall case on CUDA", stalls)
    return all(row["passes"] == "yes" for row in (*bits, *stalls))


def copy_bandwidth(rounds: int) -> float:
    """Bytes per second of a device-to-device copy, each byte counted as read and as written."""
    source, target = (torch.zeros(COPY_BYTES // 4, device="cuda") for _ in range(2))
    copy = Contender("copy", lambda: target.copy_(source))
    (timing,) = measure([copy], yardstick="copy", rounds=rounds, wait=torch.cuda.synchronize)
    return 2 * float(COPY_BYTES) / timing.median


def speed_rows(case: Case, bandwidth: float, rounds: int) -> list[Row]:
    """Each storage timed in the same rounds as the yardstick, one at a time: a GPU may hold no more."""
    rows: list[Row] = []
    for storage in STORAGES:
        pair = [
            Contender(YARDSTICK, fused(case.shapes, "cuda").step),
            Contender(f"ours {storage}", ours(case.shapes, storage, device="cuda").step),
        ]
        timings = measure(pair, yardstick=YARDSTICK, rounds=rounds, warmup=3, wait=torch.cuda.synchronize)
        sizes = (bytes_moved(STORAGES["float32"]), bytes_moved(STORAGES[storage]))
        made = [
            {**t.row(), "bytes moved": size, "share of copy": size * case.num_elements / t.median / bandwidth}
            for t, size in zip(timings, sizes, strict=True)
        ]
        rows += made[bool(rows) :]
        del pair
        torch.cuda.empty_cache()
    return rows


def time_steps(report: Report, quick: bool, rounds: int) -> None:
    """Step times against the copy and torch's fused AdamW."""
    bandwidth = copy_bandwidth(rounds)
    report.note(f"a copy of {COPY_BYTES >> 20} MiB moves {bandwidth / 1e9:,.0f} GB/s, read and written")
    chosen = [
        Case("llama-8m" if quick else "llama-1b", model_shapes("llama-8m" if quick else "llama-1b")),
        Case("small tensors", small_shapes(300)),
    ]
    for case in chosen:
        report.add(f"{case.title}; ratio to {YARDSTICK}", speed_rows(case, bandwidth, rounds))


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, then measure."""
    options = parser(__doc__, rounds=25).parse_args(arguments)
    try:
        require_device()
    except ChipError as error:
        print(f"ChipError: {error}", file=sys.stderr)
        return 2
    report = Report("gpu", options)
    passed = check(report, options.quick)
    if passed:
        time_steps(report, options.quick, 5 if options.quick else options.rounds)
    else:
        report.note("a check failed, so nothing was timed")
    report.end()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
