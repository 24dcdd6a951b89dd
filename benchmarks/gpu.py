"""Narrowgauge on a CUDA device: first that every bit is right, then how fast it is.

Correctness: steps and casts, compiled for the device, against the definition run eagerly on a CPU;
no bit may differ. Layers against the CPU's, within a hundredth. After a failed check nothing is
timed, and the status is 1.

Times: the steps and layers of ``./dev bench speed``, which keeps them. ``./dev bench trainings``
trains on the device.

Run: ``./dev gpu [--quick]``. Without a CUDA device the status is 2. ``--rehearse``
runs each line on the CPU at small sizes and measures nothing.
"""

from __future__ import annotations

import multiprocessing
import sys

import torch
from _peers import reason
from _timing import begin, parser, show
from speed import OPTIONS, report_layers, report_steps
from torch import nn

import narrowgauge as ng
from narrowgauge.matmul.gemm import operand_dtype
from narrowgauge.matmul.operand import cast_matrix
from narrowgauge.spec.computes import COMPUTES, Cast
from narrowgauge.spec.storages import STORAGES
from narrowgauge.torch_support.proof import draw, first_difference

PROCESSES = 14


# ── correctness ───────────────────────────────────────────────────────────────────────────────────


def stepped(storage: str, device: str, steps: int):
    """Train on known gradients, one of which is infinite; return the weights and the state."""
    dtype = getattr(torch, STORAGES[storage].visible)
    draws = torch.Generator().manual_seed(0)
    weights = []
    for shape in ((520, 512), (257, 33), (12, 5), (7,)):
        weights.append(nn.Parameter(torch.randn(shape, generator=draws).to(device, dtype)))
    ours = {"max_grad_norm": 1.0, "audit_every": 5, **OPTIONS}
    optimizer = ng.AdamW(weights, storage=storage, compile=device == "cuda", **ours)
    for step in range(steps):
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=draws).bfloat16()
            weight.grad = gradient.to(device, dtype) * (torch.inf if step == 3 else 1.0)
        optimizer.step()
    tensors = [weight.detach() for weight in weights]
    for state in optimizer.state_dict()["state"].values():
        tensors += state.values()
    return tensors


def num_different(expected, actual) -> int:
    """Count the tensors with other bits."""
    pairs = zip(expected, actual, strict=True)
    return sum(bool(first_difference("", a.contiguous(), b.cpu().contiguous())) for a, b in pairs)


def step_error(storage: str, device: str, steps: int) -> int:
    """Count the tensors that steps on the device leave with other bits than the CPU's."""
    return num_different(stepped(storage, "cpu", steps), stepped(storage, device, steps))


def cast_error(cast: Cast, device: str) -> int:
    """Count the results of a cast, as layers call it there, with other bits than the CPU's."""
    num_wrong = 0
    for dim in (0, 1):
        for edges in (False, True):
            x = draw(torch.bfloat16, (300, 520), edges=edges, seed=dim)
            results = []
            for place in ("cpu", device):
                key = torch.tensor(17, device=place) if cast.needs_bits else None
                parts = cast_matrix(x.to(place), cast, dim, operand_dtype(cast), key)
                results.append([part for part in parts if part is not None])
            num_wrong += num_different(*results)
    return num_wrong


def layer_results(compute: str, device: str):
    """Return the output and the gradients of a layer."""
    draws = torch.Generator().manual_seed(0)
    w, x, slope = (
        torch.randn(shape, generator=draws).to(device, torch.bfloat16)
        for shape in ((512, 256), (128, 256), (128, 512))
    )
    model = nn.Sequential(nn.Linear(256, 512, bias=False)).to(device, torch.bfloat16)
    model[0].weight.data.copy_(w / 16)
    ng.swap_linears(model, lambda name: compute, keep=())
    y = model(x.requires_grad_())
    y.backward(slope)
    return [tensor.detach().cpu().float() for tensor in (y, x.grad, model[0].weight.grad)]


def layer_error(compute: str, device: str) -> float:
    """Return the largest relative error of a layer's results; up to a hundredth counts as none."""
    pairs = zip(layer_results(compute, "cpu"), layer_results(compute, device), strict=True)
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


def check(error_of, name, *arguments):
    """Make a check and print its row at once. An exception is a failed check."""
    torch.set_num_threads(1)
    limit = 0.01 if error_of is layer_error else 0
    row = {"": f"{error_of.__name__} {name}"}
    try:
        row["error"] = error_of(name, *arguments)
        row["passes"] = "yes" if row["error"] <= limit else "NO"
    except Exception as error:  # the other checks are still made
        row["passes"] = f"NO, {reason(error)}"
    print(row, file=sys.stderr, flush=True)
    return row


def correctness(device: str, options) -> bool:
    """Check steps, casts and layers, in processes, since compiling takes most of their time."""
    casts = {}
    for compute in COMPUTES.values():
        casts |= {cast: None for cast in compute.casts.values() if not cast.is_wide}
    jobs = [(step_error, name, device, 12) for name in STORAGES]
    jobs += [(cast_error, cast, device) for cast in casts]
    jobs += [(layer_error, name, device) for name in COMPUTES]
    if options.quick:
        jobs = [(step_error, "word", device, 5), (cast_error, next(iter(casts)), device), jobs[-1]]
    if device == "cpu":
        rows = [check(*job) for job in jobs]
    else:
        with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
            rows = pool.starmap(check, jobs)
    show("tensors with other bits than the CPU's; of layers the relative error", rows)
    return all(row["passes"] == "yes" for row in rows)


# ── the command ───────────────────────────────────────────────────────────────────────────────────


def main(arguments=None) -> int:
    """Check, then measure."""
    flags = parser(__doc__, rounds=25)
    flags.add_argument("--rehearse", action="store_true", help="run on the CPU, at small sizes")
    options = flags.parse_args(arguments)
    options.quick |= options.rehearse
    if not (options.rehearse or torch.cuda.is_available()):
        what = "./dev gpu needs a CUDA device, and PyTorch finds none. Try ./dev gpu --rehearse."
        print(what, file=sys.stderr)
        return 2
    begin("gpu", options, ("triton", "torchao", "flashoptim"))
    device = "cpu" if options.rehearse else "cuda"
    all_pass = correctness(device, options)
    if all_pass:
        rounds = 2 if options.quick else options.rounds
        report_steps(rounds, options.quick)
        report_layers(rounds, options.quick)
    return int(not all_pass)


if __name__ == "__main__":
    sys.exit(main())
