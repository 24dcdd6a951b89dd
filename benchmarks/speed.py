"""What the arithmetic costs in time: steps, host time of layers and of many small tensors, first
steps.

Claim: a step in 6 to 14 bytes a parameter takes no longer than torch's fused float32 AdamW, and the
host keeps up with it. Baselines, in the same rounds: ``torch.optim.AdamW(fused=True)`` over
float32; ``nn.Linear`` in bfloat16. Peers that are not installed are left out with a line. Steps
have their gradients and clip nothing. A round is ten steps, of which one is audited. Kernels are
compiled before the first round. First steps are whole processes, without the import of Narrowgauge;
the plain and the audited step are built and proved.

Run: ``./dev bench speed [--quick]``; ``ATEN_CPU_CAPABILITY=avx2`` measures code for AVX2.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from timing import Contender, Report, Row, measure, parser
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.optim import multi_tensor
from narrowgauge.torch_support import triton

STORAGES = ("word", "exact", "compact", "states8", "kahan")
STEPS = 10
"""Steps of a round: by default one of ten is audited."""
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FUSED = "torch fused"
LINEAR = "nn.Linear"


def torchao_adamw8(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, bf16_stochastic_round=True, **OPTIONS)


def optimi_kahan(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    from optimi import AdamW

    return AdamW(params, kahan_sum=True, **OPTIONS)


def heavyball_ecc(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    import heavyball

    # By default a step takes the gradients away, and the next one does nothing.
    return heavyball.AdamW(params, ecc="bf16+8", param_ecc="bf16+8", consume_grad=False, **OPTIONS)


def bitsandbytes_adamw8(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, **OPTIONS)


PEERS = {
    "torchao AdamW8bit": torchao_adamw8,
    "optimi Kahan": optimi_kahan,
    "HeavyBall ecc": heavyball_ecc,
    "bitsandbytes AdamW8bit": bitsandbytes_adamw8,
}


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Parameters with gradients."""
    params: list[Tensor] = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape).to(dtype)
    return params


def ten(step: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that takes the steps of a round."""

    def run() -> None:
        for _ in range(STEPS):
            step()

    return run


def steps(
    shapes: Sequence[tuple[int, ...]], report: Report, peers: bool = False
) -> Iterator[Contender]:
    """The step of each storage, and of each peer that works here."""
    fused = torch.optim.AdamW(parameters(shapes, torch.float32), fused=True, **OPTIONS)
    yield Contender(FUSED, ten(fused.step), per_call=STEPS)
    for storage in STORAGES:
        params = parameters(shapes, torch.bfloat16)
        ours = ng.AdamW(params, storage=storage, compile=True, **OPTIONS)
        yield Contender(storage, ten(ours.step), per_call=STEPS)
    params = parameters(shapes, torch.bfloat16)
    unaudited = ng.AdamW(params, storage="word", compile=True, audit_every=0, **OPTIONS)
    yield Contender("word, no audit", ten(unaudited.step), per_call=STEPS)
    for name, make in PEERS.items() if peers else ():
        try:
            step = make(parameters(shapes, torch.bfloat16)).step
            step()
        except Exception as error:  # not installed, or not for this device
            report.note(
                f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"
            )
        else:
            yield Contender(name, ten(step), per_call=STEPS, rounds=2)


def passes(layer: nn.Module) -> Callable[[], None]:
    """A forward and a backward pass, so small that the host is what takes time."""
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)

    def run() -> None:
        layer(x).sum().backward()

    return run


def layers(*, compiled: bool) -> Iterator[Contender]:
    """Linear layers of 64 × 64 in some computes."""
    for name in (LINEAR, "float8-row", "int8-row", "mxfp8"):
        layer: nn.Module = nn.Sequential(nn.Linear(64, 64, bias=False).bfloat16())
        if name != LINEAR:
            ng.swap_linears(layer, name)
        yield Contender(name, passes(torch.compile(layer) if compiled else layer))  # type: ignore[arg-type]


def host_times(counts: Sequence[int]) -> Iterator[Row]:
    """The host's time of a step on a GPU, of tensors of one element: launches are left out, as are
    torch's kernels in effect.
    """

    def microseconds(optimizer: torch.optim.Optimizer, count: int) -> float:
        optimizer.step()
        times = [timeit.timeit(optimizer.step, number=1) for _ in range(20)]
        return 1e6 * statistics.median(times) / count

    with (
        mock.patch.object(triton, "INTERPRET", True),
        mock.patch.object(multi_tensor, "why_not_printed", lambda *args: ""),
        mock.patch.object(multi_tensor.Table, "launch", lambda *args, **options: None),
    ):
        for count in counts:
            shapes = [(1, 1)] * count
            row = {"": f"{count} tensors"}
            for way in ("foreach", "fused"):
                theirs = torch.optim.AdamW(
                    parameters(shapes, torch.float32), **{way: True}, **OPTIONS
                )
                row[f"torch {way} µs a tensor"] = microseconds(theirs, count)
            for storage in ("word", "compact"):
                params = parameters(shapes, torch.bfloat16)
                ours = ng.AdamW(params, storage=storage, compile=True, audit_every=0, **OPTIONS)
                row[f"{storage} µs a tensor"] = microseconds(ours, count)
            yield row


FIRST_STEP = """
import torch, narrowgauge as ng, time
p = torch.nn.Parameter(torch.randn(1024, 1024).bfloat16()); p.grad = torch.randn_like(p)
optimizer = ng.AdamW([p], storage={storage!r}, compile=True, audit_every=0)
began = time.perf_counter(); optimizer.step(); print(time.perf_counter() - began)
"""


def first_steps(storages: Sequence[str]) -> Iterator[Row]:
    """The seconds of the first step of a process, from an empty and from a warm cache."""
    for storage in storages:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "NARROWGAUGE_CACHE": folder}
            command = [sys.executable, "-c", FIRST_STEP.format(storage=storage)]
            empty, warm = (
                float(
                    subprocess.run(
                        command, env=environment, capture_output=True, text=True, check=True
                    ).stdout
                )
                for _ in range(2)
            )
        yield {"": storage, "empty cache s": empty, "warm cache s": warm}


def main() -> int:
    """Measure and print."""
    options = parser(__doc__, rounds=9).parse_args()
    report = Report(
        "speed", options, peers=("torchao", "torch-optimi", "heavyball", "bitsandbytes")
    )
    side, count = (256, 20) if options.quick else (4096, 300)
    rounds = 2 if options.quick else options.rounds

    def table(title: str, contenders: Iterator[Contender], baseline: str, rounds: int) -> None:
        report.add(
            title, [t.row() for t in measure(list(contenders), baseline=baseline, rounds=rounds)]
        )

    table(
        f"one step of {2 * side * side:,} parameters",
        steps([(2 * side, side)], report, peers=True),
        FUSED,
        rounds,
    )
    shapes: dict[str, list[tuple[int, ...]]] = {
        "64 tensors of 1,048,576": [(1024, 1024)] * 64,
        "one tensor of 8,388,608": [(4096, 2048)],
        f"{count} tensors of 8,192": [(128, 64)] * count,
    }
    for name, several in shapes.items():
        if not options.quick or "8,192" in name:
            table(f"one step of {name}", steps(several, report), FUSED, rounds)
    table("forward and backward of a layer, eager", layers(compiled=False), LINEAR, 20 * rounds)
    table("forward and backward of a layer, compiled", layers(compiled=True), LINEAR, 20 * rounds)
    report.add(
        "the host in a step on a GPU", list(host_times((300,) if options.quick else (300, 3000)))
    )
    if options.quick:
        storages = ("word",)
    else:
        storages = (*STORAGES, "collage-plus", "float8/collage-plus")
    report.add("first step", list(first_steps(storages)))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
