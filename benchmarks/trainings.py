"""Train language models with one optimizer, or one number format, beside another: the runs behind
every figure of a loss.

Claim: each row has its cost in validation loss written down, by runs that anybody can repeat. A run
is a line of ``benchmarks/trainings.jsonl``, from which ``docs/evidence.py`` makes the tables. A seed
fixes first weights, batches and random low bits; all seeds learn one text, whose hash is in the
record. Runs of a seed are compared in pairs, which also agree in the kind of processor and in the
digests of the baseline's step. Each table names its controls, which must lose.

Baseline: ``master``, float32 weights and moments beside bfloat16 weights, of the same setting, rate
and seed; ``word`` for a compute over ``word``.

Run: ``./dev bench trainings SETTING --row ROW … [--lr RATE …] [--seeds 0 1 2]`` trains what has no
record of this processor, or of the GPU where there is one, with the digests of today's step.
``./dev bench trainings equivalence`` trains the runs of :func:`equivalence` in their order, and
``--list`` prints which of them have a record. A run that is stopped leaves no record and starts anew.
Settings are in :data:`SETTINGS`, rows in ``_rows.py``. A run of ``llama-1m`` takes one to five
minutes of a core, of ``llama-8m`` ten to thirty, a step of SmolLM2 2.5 seconds with AVX512.
``--quick`` trains six steps and keeps nothing. On a quiet machine that multiplies bfloat16,
``./dev bench trainings compare --seeds 0 1 --row float32/float32 bfloat16/float32 bfloat16/naive
bfloat16/word float16/split bfloat16/collage-plus`` compares speeds and losses of SmolLM2 on one
page, and writes them into ``benchmarks/compare.jsonl``.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import itertools
import json
import math
import statistics
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from _conditions import conditions, digests, keep_newest
from _rows import Float8Sums, bytes_per_param, prepared, recipe_of, row_of
from _starts import BYTES, SMOLLM2, Start, expect_pinned, start_of
from _timing import exit_by
from outliers import peaks_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import narrowgauge as ng
from narrowgauge.assembly.preparation import compute_scope
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.spec.parse import parse

FILE = Path(__file__).with_name("trainings.jsonl")
COMPARED = Path(__file__).with_name("compare.jsonl")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Setting:
    """What all runs of a table share.

    Args:
        warmup: steps until the peak rate.
        schedule: ``cosine`` or ``linear`` to ``final_lr``, or ``constant``.
        weight_decay: of matrices.
        micro_batches: of a step, for rows that round their sums.
        evaluations: steps after which the held-out text is judged, beside the first and the last.
        with_outliers: also record what enters ``down_proj``, and what float8 costs there.
    """

    model: str
    steps: int
    lr: float
    batch_size: int = 8
    length: int = 128
    warmup: int = 10
    schedule: str = "linear"
    final_lr: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float = math.inf
    held_out: int = 64
    micro_batches: int = 1
    evaluations: Sequence[int] = (25, 50, 100, 200, 400, 600, 800, 1000, 1500, 2000, 3000)
    with_outliers: bool = False

    def rate(self, step: int, peak: float) -> float:
        """Return the learning rate of a step; steps count from 0."""
        if step < self.warmup:
            return peak * (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        if self.schedule == "constant":
            return peak
        if self.schedule == "linear":
            return peak + (self.final_lr - peak) * share
        return self.final_lr + (peak - self.final_lr) * (1 + math.cos(math.pi * share)) / 2


_SCRATCH = Setting(
    "llama-1m", 800, 1e-3, warmup=80, schedule="cosine", final_lr=1e-6, betas=(0.9, 0.95),
    weight_decay=0.1, max_grad_norm=1.0, held_out=512, evaluations=(),
)  # fmt: skip
_CONSTANT = replace(_SCRATCH, steps=1000, lr=3e-3, warmup=50, schedule="constant")
_LASTING = Setting(BYTES, 1000, 1e-5, batch_size=1, schedule="constant")
SETTINGS = {
    "llama-1m": _SCRATCH,
    "llama-8m": replace(_SCRATCH, model="llama-8m", steps=1500, warmup=150),
    "rules": replace(_SCRATCH, steps=400, warmup=40),
    "sums": replace(_SCRATCH, steps=400, warmup=40, batch_size=64, length=32, micro_batches=64),
    "diverging": _CONSTANT,
    "outliers": replace(
        _CONSTANT, steps=5000, lr=1e-2, evaluations=range(250, 5000, 250), with_outliers=True
    ),
    "fine-tune": Setting(SMOLLM2, 100, 2e-5, batch_size=2, length=256, held_out=32),
    "compare": Setting(SMOLLM2, 60, 2e-5, batch_size=2, length=256, held_out=32),
    "lasting": _LASTING,
    "lasting SmolLM2": replace(_LASTING, model=SMOLLM2, lr=2e-5),
}


def lines():
    """Return the records of the file."""
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


# ── a run ─────────────────────────────────────────────────────────────────────────────────────────


def loss_of(model, blocks: Tensor, scope) -> Tensor:
    """Return the mean loss of the next tokens of blocks ``[batch, length + 1]``."""
    inputs, targets = blocks[:, :-1], blocks[:, 1:]
    with scope:
        logits = model(input_ids=inputs).logits
    return cross_entropy(logits.float().mT, targets)


@torch.no_grad()
def validation_loss(model: nn.Module, blocks: Tensor, scope) -> float:
    model.eval()
    losses = []
    for part in blocks.split(8):
        losses.append(loss_of(model, part.to(DEVICE), scope).item())
    model.train()
    return statistics.fmean(losses)


class Training:
    """A run of a row at a rate.

    Attributes:
        losses: validation losses in nats per token, by step; ``None`` where one is not finite.
        ended: the last step, which is an earlier one if the loss was not finite.
        rose: the first step whose loss is 1 nat above the first one's.
        alarm: what ``ng.watch`` said first, where it watched.
        outliers: of a setting that asks for them, by step.
    """

    def __init__(self, row: str, lr: float, seed: int, setting: Setting, start: Start) -> None:
        self.lr = lr
        self.seed = seed
        self.setting = setting
        self.start = start
        self.model = start.model.to(DEVICE)
        options = {"lr": lr, "betas": setting.betas, "weight_decay": setting.weight_decay}
        if math.isfinite(setting.max_grad_norm):
            options["max_grad_norm"] = setting.max_grad_norm
        self.optimizer = prepared(row, self.model, seed, options)
        self.is_ours = isinstance(self.optimizer, ng.Optimizer)
        self.scope = torch.autocast(DEVICE, torch.bfloat16, enabled=row_of(row).name == "autocast")
        if self.is_ours:
            self.scope = compute_scope(parse(recipe_of(row_of(row))), torch.device(DEVICE))
        scales_loss = self.is_ours and self.optimizer.scales_loss
        self.scaler = torch.amp.GradScaler(DEVICE, enabled=scales_loss)
        self.sums = None
        rounding = row_of(row).options.get("sums")
        if rounding not in (None, "nearest"):
            raise NarrowgaugeError(f"Cannot round sums by {rounding!r}.", "Take sums=nearest.")
        if rounding:
            self.sums = Float8Sums(self.model.parameters())
        self.losses = {}
        self.outliers = {}
        self.ended = 0
        self.rose = None
        self.alarm = ""

    def batch(self, step: int) -> Tensor:
        """Return the blocks of a step, which seed and step fix."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        length = self.setting.length + 1
        size = (self.setting.batch_size, 1)
        places = torch.randint(len(self.start.train) - length, size, generator=generator)
        return self.start.train[places + torch.arange(length)].to(DEVICE)

    def take_step(self, step: int) -> float:
        """Take one step, and return its loss."""
        rate = self.setting.rate(step, self.lr)
        for group in self.optimizer.param_groups:
            is_tensor = isinstance(group["lr"], Tensor)  # torchao's
            group["lr"] = torch.tensor(rate) if is_tensor else rate
        parts = self.batch(step).chunk(self.setting.micro_batches if self.sums else 1)
        total = 0.0
        for part in parts:
            loss = loss_of(self.model, part, self.scope) / len(parts)
            self.scaler.scale(loss).backward()
            total += loss.item()
            if self.sums:
                self.sums.add()
        if self.sums:
            self.sums.give()
        if not self.is_ours and math.isfinite(self.setting.max_grad_norm):
            nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return total

    def evaluate(self, step: int) -> bool:
        """Judge the held-out text, and return whether its loss is finite."""
        loss = validation_loss(self.model, self.start.held_out, self.scope)
        self.losses[str(step)] = loss if math.isfinite(loss) else None
        if self.setting.with_outliers:
            self.outliers[str(step)] = outliers(self.model, self.start.held_out[:64])
        print(step, loss, flush=True)
        return math.isfinite(loss)

    def run(self, is_watched: bool) -> None:
        """Train to the end, or until a loss is not finite."""
        watch = ng.watch(self.model, self.optimizer) if is_watched else None
        self.evaluate(0)
        first_loss = math.nan
        for step in range(1, self.setting.steps + 1):
            loss = self.take_step(step - 1)
            self.ended = step
            if step == 1:
                first_loss = loss
            if self.rose is None and not loss < first_loss + 1:
                self.rose = step
            if watch is not None:
                with warnings.catch_warnings(record=True) as notices:
                    warnings.simplefilter("always")
                    watch.step(loss)
                if notices and not self.alarm:
                    self.alarm = f"step {step}: {notices[0].message}"
            if not math.isfinite(loss):
                break
            is_judged = step in (*self.setting.evaluations, self.setting.steps)
            if is_judged and not self.evaluate(step):
                break


def outliers(model: nn.Module, blocks: Tensor):
    """Return the worst inputs of ``down_proj`` over all layers, and what float8 costs there.

    ``channel_to_median`` is the largest channel over the median one. A compute has its loss less
    that of bfloat16 for the same weights.
    """
    ratio = 0.0
    for part in blocks.split(8):
        for channels in peaks_of(model, part.to(DEVICE)).values():
            ratio = max(ratio, float(channels.max() / channels.median()))
    figures = {"channel_to_median": ratio}
    wide = validation_loss(model, blocks, nullcontext())
    for compute in ("float8-tensor", "float8-row"):
        swapped = copy.deepcopy(model)
        ng.swap_linears(swapped, compute)
        figures[compute] = validation_loss(swapped, blocks, nullcontext()) - wide
    return figures


# ── the command ───────────────────────────────────────────────────────────────────────────────────


def equivalence(seed: int):
    """Return the rows of ``llama-8m`` that ask with this seed whether ``word`` ends where ``master``
    does.

    The margin was written down before the runs: ``word`` is equivalent if the 90 % interval of the
    paired differences of twelve seeds lies within ± 0.010 nats (two one-sided tests). Four seeds of
    ``master`` with one bit of one weight turned show how far two equal runs end apart. Each seed is
    trained on one kind of processor, and seeds may differ in it.
    """
    return ["master", "word", "master turned"] if seed < 4 else ["master", "word"]


def head_of(name: str, row: str, lr: float, seed: int):
    """Return what the record of a run begins with."""
    setting = SETTINGS[name]
    head = {"setting": name, "row": row, "model": setting.model, "lr": lr, "seed": seed}
    head |= {"beta2": setting.betas[1], "steps": setting.steps}
    return head | conditions() | {"digests": digests(row)}


def processors_with(head) -> set[str]:
    """Return the kinds of processor that have a record of a run with its own row's digests."""
    wanted = head | {"digests": head["digests"][head["row"]]}
    processors = set()
    for line in lines():
        line["digests"] = line.get("digests", {}).get(head["row"])
        differing = {name for name in wanted if line.get(name) != wanted[name]}
        if differing <= {"date", "processor"}:
            processors.add(line["processor"])
    return processors


def train(name: str, row: str, lr: float, seed: int, options: argparse.Namespace) -> None:
    """Train a run that has no record of this processor and these digests, and append its record."""
    setting = SETTINGS[name]
    head = head_of(name, row, lr, seed)
    if head["processor"] in processors_with(head) and not options.quick:
        return
    if options.list:
        print(f"to train: {name}, {row}, rate {lr}, seed {seed}")
        return
    if options.quick:
        setting = replace(setting, steps=6, held_out=8, evaluations=())
    print(name, row, lr, seed, flush=True)
    start = start_of(setting.model, seed, setting.held_out, setting.length)
    if not options.quick:
        expect_pinned(setting.model, start.text)
    training = Training(row, lr, seed, setting, start)
    training.run(options.watch)
    head |= {
        "text": start.text,
        "losses": training.losses,
        "unigram": start.unigram,
        "bytes_per_param": bytes_per_param(training.optimizer),
        "ended": training.ended,
        "rose": training.rose,
        "alarm": training.alarm,
        "outliers": training.outliers,
    }
    if options.quick:
        return
    with FILE.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(json.dumps(head) + "\n")


def compare(rows, num_seeds: int, out: str) -> None:
    """Compare recipes in a fine-tune of SmolLM2 by ``ng.compare``; write its page and records."""
    setting = SETTINGS["compare"]

    def train_row(row: str, seed: int, record) -> None:
        start = start_of(setting.model, seed, setting.held_out, setting.length)
        training = Training(row, setting.lr, seed, setting, start)
        with record(training.model, training.optimizer) as recorder:
            for step in range(setting.steps):
                recorder.step(training.take_step(step), tokens=setting.batch_size * setting.length)
            recorder.evaluate(validation_loss(training.model, start.held_out, training.scope))

    comparison = ng.compare(train_row, rows, seeds=num_seeds, out=out)
    print(comparison.table().plain())
    print(comparison.verdict)
    records = []
    for row in comparison.rows:
        recipe = row["recipe"]
        records.append({"row": recipe, **row, "digests": digests(recipe, ())})
    keep_newest(COMPARED, records)


def main(arguments=None) -> int:
    """Run the benchmark."""
    raw = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    flags.add_argument("setting", choices=[*SETTINGS, "equivalence"])
    flags.add_argument("--row", nargs="+", default=["master", "word"])
    flags.add_argument("--lr", nargs="+", type=float, help="default: the setting's")
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    flags.add_argument("--watch", action="store_true", help="note what ng.watch says first")
    flags.add_argument("--threads", type=int, default=1)
    flags.add_argument("--quick", action="store_true", help="six steps; nothing is kept")
    flags.add_argument("--out", default="comparisons/smollm2", help="folder of compare's page")
    flags.add_argument("--list", action="store_true", help="print the runs that have no record")
    options = flags.parse_args(arguments)
    warnings.simplefilter("ignore", EmulationNotice)
    torch.set_num_threads(options.threads)
    if options.setting == "equivalence":
        lr = SETTINGS["llama-8m"].lr
        for seed in range(12):
            rows = equivalence(seed)
            heads = [head_of("llama-8m", row, lr, seed) for row in rows]
            if not set.intersection(*map(processors_with, heads)):
                for row in rows:
                    train("llama-8m", row, lr, seed, options)
        return 0
    if options.setting == "compare":
        compare(options.row, len(options.seeds), options.out)
        return 0
    rates = options.lr or [SETTINGS[options.setting].lr]
    for seed, lr, row in itertools.product(options.seeds, rates, options.row):
        train(options.setting, row, lr, seed, options)
    return 0


if __name__ == "__main__":
    exit_by(main)
