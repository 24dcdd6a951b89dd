"""Train with a high constant rate, and follow the outliers of SwiGLU and what float8 costs there.

Claim: none; the published condition (2409.12517: long training, weight decay, aligned input weights)
is repeated in the small. A llama-1m trains on 8 × 128 tokens of the standard library's source in
``bfloat16/word``. The rate is 1e-2, three times the usual one, with a decay of 0.1 and without. Every
250 steps, 64 held-out sequences give the inputs of ``down_proj``. A row has, of the worst layer, their
largest magnitude over the root mean square, their kurtosis, and the largest channel over the median
one. Cosine is that of the two weights that feed the largest channel. The same weights are evaluated
in ``float8-tensor`` and ``float8-row``.

Baseline: the first step, and bfloat16 matmuls of the same weights. Rows are appended to
``benchmarks/growing_outliers.jsonl``.

Run: ``./dev bench growing_outliers [--steps 5000] [--lr 0.01]``; 250 steps take half a minute of a core.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _stdlib import stdlib_tokens
from _timing import Report, Row, parser
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

import narrowgauge as ng
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.trainer.session import build, train_step
from narrowgauge.trainer.settings import Settings
from narrowgauge.trainer.tokens import open_tokens

FILE = Path(__file__).with_name("growing_outliers.jsonl")
MODEL = "llama-1m"
EVERY = 250


@torch.no_grad()
def loss_of(model: Any, tokens: Tensor) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens[:, :-1]).logits.float()
    return float(cross_entropy(logits.mT, tokens[:, 1:]))


def outliers(model: nn.Module, tokens: Tensor) -> Row:
    """Return the worst of all layers, and the losses of float8 less that of bfloat16."""
    row: Row = {"max_to_rms": 0.0, "kurtosis": 0.0, "channel_to_median": 0.0}

    def follow(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float().flatten(0, -2)
        squares = x.square()
        ratio = float((squares.max() / squares.mean()).sqrt())
        kurtosis = float(squares.square().mean() / squares.mean() ** 2)
        channels = x.abs().amax(0)
        above = float(channels.max() / channels.median())
        row["kurtosis"] = max(row["kurtosis"], kurtosis)
        row["channel_to_median"] = max(row["channel_to_median"], above)
        if ratio > row["max_to_rms"]:
            channel = int(channels.argmax())
            mlp: Any = mlps[layer]
            gate, up = mlp.gate_proj.weight[channel], mlp.up_proj.weight[channel]
            cosine = cosine_similarity(gate.float(), up.float(), dim=0)
            row.update({"max_to_rms": ratio, "cosine": float(cosine)})

    followed: Any = copy.deepcopy(model).eval()
    mlps = {block.mlp.down_proj: block.mlp for block in followed.model.layers}
    hooks = [layer.register_forward_pre_hook(follow) for layer in mlps]
    row["bfloat16"] = loss_of(followed, tokens)
    for hook in hooks:
        hook.remove()
    for compute in ("float8-tensor", "float8-row"):
        swapped = copy.deepcopy(followed)
        ng.swap_linears(swapped, compute)
        row[compute] = loss_of(swapped, tokens) - row["bfloat16"]
    return row


def warmed_up(lr: float) -> Callable[[int], float]:
    return lambda step: lr * min(1.0, step / 100)


def main(arguments: Sequence[str]) -> int:
    """Train side by side, and print the table."""
    flags = parser(__doc__, rounds=1)
    flags.add_argument("--steps", type=int, default=5000)
    flags.add_argument("--lr", type=float, default=1e-2)
    options = flags.parse_args(arguments)
    warnings.simplefilter("ignore", EmulationNotice)
    torch.set_num_threads(1)
    report = Report("growing_outliers", options)
    data = open_tokens(stdlib_tokens(MODEL))
    tokens = torch.from_numpy(data.validation(64, 128)).long()
    rows: list[Row] = []
    sessions = []
    for decay in (0.1, 0.0):
        settings = Settings(
            model=MODEL,
            steps=options.steps,
            sequence_length=128,
            lr=options.lr,
            warmup_steps=100,
            weight_decay=decay,
            gauges_every=0,
        )
        session = build(settings, data)
        session.schedule = warmed_up(options.lr)
        sessions.append(session)
    for step in range(0, 1 if options.quick else options.steps + 1, EVERY):
        for session in sessions:
            while session.step < step:
                train_step(session)
            row = {"lr": options.lr, "decay": session.settings.weight_decay, "step": step}
            rows.append(row | outliers(session.model, tokens))
            if not options.quick:
                with FILE.open("a") as stream:
                    stream.write(json.dumps(rows[-1]) + "\n")
    report.add("inputs of down_proj, and losses of float8 less bfloat16's", rows)
    return report.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
