"""Train with 8-bit optimizer states that diverge, with the first alarm of ``ng.watch``, and with
those that do not.

Claim: second moments with one linear scale for the tensor (``linear``), or in e5m2 without a scale
(``e5m2``), become zero where gradients are small. So the weights move by the first moment over
epsilon, and the loss leaves its start within ten steps. The watch names the second moment before.
``e5m2 scaled`` gets the same notice and trains: the notice says that the moments are not AdamW's,
and not that they diverge. ``states8`` trains at the same rate without a notice, with matmuls in
bfloat16 or in ``float8-row``. Source: Dettmers et al., 2110.02861, table 3, where linear codes fail.

A llama-1m trains on 8 × 128 tokens of the standard library's source: AdamW at its usual rate after
50 steps of warm-up, beta2 0.95, decay 0.1, gradients clipped to 1, autocast to bfloat16. A run ends
where its loss is not finite. Rows are appended to ``benchmarks/diverging.jsonl``.

Baseline: ``torch.optim.AdamW`` in float32, the same seed.

Run: ``./dev bench diverging [--row ROW ...] [--seeds 0 1 2] [--steps 1000]``; a thousand steps take
three minutes of a core, and ten in ``float8-row``.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from _published_states import by_amax, times_scale
from _stdlib import stdlib_tokens
from _timing import Report, Row, parser
from torch import Tensor

import narrowgauge as ng
from narrowgauge.measuring.hooks import RunNotice
from narrowgauge.trainer import language_model
from narrowgauge.trainer.tokens import open_tokens

FILE = Path(__file__).with_name("diverging.jsonl")
MODEL = "llama-1m"
LR = 3e-3


def linear(moments: Tensor) -> Tensor:
    """Round to multiples of a 255th of the largest."""
    step = moments.max().clamp(min=1e-30) / 255
    return (moments / step).round() * step


def e5m2(moments: Tensor) -> Tensor:
    return moments.to(torch.float8_e5m2).float()


def e5m2_scaled(moments: Tensor) -> Tensor:
    """Round to e5m2, the largest to the format's largest."""
    return times_scale(by_amax(moments, torch.float8_e5m2), moments.shape)


class RoundedAdamW(torch.optim.AdamW):
    """AdamW that keeps the second moments of matrices as a function rounds them."""

    def __init__(self, groups: Any, rounding: Callable[[Tensor], Tensor], **options: Any) -> None:
        super().__init__(groups, **options)
        self.rounding = rounding

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter, state in self.state.items():
            if parameter.ndim > 1:
                state["exp_avg_sq"].copy_(self.rounding(state["exp_avg_sq"]))
        return loss


ROUNDINGS = {"linear": linear, "e5m2": e5m2, "e5m2 scaled": e5m2_scaled}
ROWS = ("float32", *ROUNDINGS, "bfloat16/states8", "float8-row/states8")


def optimizer_of(row: str, model: Any) -> torch.optim.Optimizer:
    """Give the model the row's layers, and return its optimizer."""
    options: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if row in ROUNDINGS:
        return RoundedAdamW(model.parameters(), ROUNDINGS[row], **options)
    if row == "float32":
        return torch.optim.AdamW(model.parameters(), **options)
    compute, storage = row.split("/")
    ng.swap_linears(model, compute)
    return ng.AdamW(model.parameters(), storage=storage, **options)


def trained(row: str, seed: int, steps: int) -> Row:
    """Train once; return what the loss did, and the first alarm."""
    model: Any = language_model.build(MODEL, seed=seed)
    optimizer = optimizer_of(row, model)
    data = open_tokens(stdlib_tokens(MODEL))
    tokens = torch.from_numpy(data.train.astype(np.int64))
    windows = tokens.unfold(0, 129, 1)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    alarm = ""
    watch = ng.watch(model, optimizer, max_grad_norm=1.0)
    while len(losses) < steps and math.isfinite(sum(losses)):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (len(losses) + 1) / 50)
        batch = windows[torch.randint(len(windows), (8,), generator=generator)]
        with warnings.catch_warnings(record=True) as notices, torch.autocast("cpu", torch.bfloat16):
            warnings.simplefilter("always", RunNotice)
            loss = language_model.loss_sum(model, batch) / batch[:, 1:].numel()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            watch.step(losses[-1])
        for notice in notices:
            alarm = alarm or str(notice.message)
    last = fmean(losses[-50:])
    above = [step for step, loss in enumerate(losses, 1) if not loss < losses[0] + 1]
    return {
        "row": row,
        "seed": seed,
        "steps": len(losses),
        "first step 1 nat above the start": min(above, default=""),
        "mean of the last 50 losses": last if math.isfinite(last) else "not finite",
        "first alarm": alarm,
    }


def main(arguments: Sequence[str]) -> int:
    """Print the table, and append its rows to the file."""
    flags = parser(__doc__, rounds=1)
    flags.add_argument("--row", nargs="+", choices=ROWS, default=ROWS)
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    flags.add_argument("--steps", type=int, default=1000)
    options = flags.parse_args(arguments)
    torch.set_num_threads(1)
    report = Report("diverging", options)
    rows = []
    for seed, row in itertools.product(options.seeds, options.row):
        rows.append(trained(row, seed, 3 if options.quick else options.steps))
        if not options.quick:
            with FILE.open("a") as stream:
                stream.write(json.dumps(rows[-1]) + "\n")
    report.add(f"{MODEL} at {LR}", rows)
    return report.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
