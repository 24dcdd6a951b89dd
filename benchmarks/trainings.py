"""Train language models with one optimizer, or one number format, beside another: the runs behind
every figure of a loss.

Claim: each row has its cost in validation loss written down, by runs that anybody can repeat. A run
is a line of ``benchmarks/trainings.jsonl``, from which ``docs/evidence.py`` makes the tables. A seed
fixes first weights, batches, held-out text and random low bits, so runs of a seed are compared in
pairs. Each table names its controls, which must lose.

Baseline: ``master``, float32 weights and moments beside bfloat16 weights, of the same setting, rate
and seed; ``word`` for a compute over ``word``.

Run: ``./dev bench trainings SETTING --row ROW … [--lr RATE …] [--seeds 0 1 2]`` trains what has no
record of this processor, or of the GPU where there is one. Settings are in :data:`SETTINGS`, rows in
``_rows.py``. A stopped run of ours goes on where it was. A run of ``llama-1m`` takes one to five
minutes of a core, of ``llama-8m`` ten to thirty, a step of SmolLM2 2.5 seconds with AVX512.
``--quick`` trains six steps and keeps nothing; ``--page`` draws README's picture.
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
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from _rows import Float8Sums, bytes_per_param, prepared, row_of
from _starts import BYTES, RUNS, SMOLLM2, Start, start_of
from _timing import exit_by
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

import narrowgauge as ng
from narrowgauge.matmul.gemm import EmulationNotice

FILE = Path(__file__).with_name("trainings.jsonl")
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "fine-tune.svg"
SHOWN = {
    "torch.optim.AdamW": "torch AdamW bfloat16",
    "float32 master weights": "master",
    "ng.AdamW": "word random",
}
CHECKPOINT_EVERY = 100
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
    evaluations: tuple[int, ...] = (25, 50, 100, 200, 400, 600, 800, 1000, 1500, 2000, 3000)
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
        _CONSTANT, steps=5000, lr=1e-2, evaluations=tuple(range(250, 5000, 250)), with_outliers=True
    ),
    "fine-tune": Setting(SMOLLM2, 100, 2e-5, batch_size=2, length=256, held_out=32),
    "lasting": _LASTING,
    "lasting SmolLM2": replace(_LASTING, model=SMOLLM2),
}


@dataclass(frozen=True)
class Record:
    """A finished run.

    Args:
        losses: validation losses in nats per token, by step; ``null`` where one is not finite.
        unigram, bigram: losses of token frequencies and of bigrams on the same text.
        bytes_per_param: weight, gradient and states, counted from live tensors.
        edq: effective descent quality of the last audit; ``None`` for optimizers of others.
        rose: the first step whose loss is 1 nat above the first one's.
        alarm: what ``ng.watch`` said first, where it watched.
        outliers: of a setting that asks for them, by step.
        vectors: vector instructions of the processor, or the name of the GPU: others round
            differently.
    """

    setting: str
    row: str
    model: str
    lr: float
    beta2: float
    steps: int
    seed: int
    losses: dict[str, float | None]
    unigram: float
    bigram: float
    bytes_per_param: float
    edq: float | None
    torch: str
    vectors: str
    date: str
    rose: int | None = None
    alarm: str = ""
    outliers: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A run to do."""

    setting: str
    row: str
    lr: float
    seed: int
    watched: bool = False

    @property
    def place(self) -> Path:
        name = f"{self.setting} {self.row} {self.lr:g} {self.seed}"
        return RUNS / "trainings" / name.replace("/", "-").replace(" ", "-")

    def is_recorded(self) -> bool:
        """Return whether this processor has done the run."""
        asked = (self.setting, self.row, self.lr, self.seed, vectors(), torch.__version__)
        names = ("setting", "row", "lr", "seed", "vectors", "torch")
        return any(tuple(map(line.get, names)) == asked for line in lines())


def lines() -> list[dict[str, Any]]:
    """Return the records of the file."""
    if not FILE.is_file():
        return []
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def append(record: Record) -> None:
    with FILE.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(json.dumps(asdict(record)) + "\n")


def vectors() -> str:
    """Return what decides the bits of a run beside torch."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return torch.backends.cpu.get_cpu_capability()


# ── a run ─────────────────────────────────────────────────────────────────────────────────────────


def loss_of(model: Any, blocks: Tensor, is_wide: bool) -> Tensor:
    """Return the mean loss of the next tokens of blocks ``[batch, length + 1]``."""
    inputs, targets = blocks[:, :-1], blocks[:, 1:]
    with torch.autocast(DEVICE, torch.bfloat16, enabled=is_wide):
        logits = model(input_ids=inputs).logits
    return cross_entropy(logits.float().mT, targets)


@torch.no_grad()
def validation_loss(model: nn.Module, blocks: Tensor, is_wide: bool) -> float | None:
    model.eval()
    losses = []
    for part in blocks.split(8):
        losses.append(loss_of(model, part.to(DEVICE), is_wide).item())
    model.train()
    loss = statistics.fmean(losses)
    return loss if math.isfinite(loss) else None


class Training:
    """A model, its optimizer, and how far it is."""

    def __init__(self, job: Job, setting: Setting, start: Start) -> None:
        self.job = job
        self.setting = setting
        self.start = start
        self.row = row_of(job.row)
        self.model = copy.deepcopy(start.model).to(DEVICE)
        self.is_wide = self.row.name == "autocast"
        options = {"lr": job.lr, "betas": setting.betas, "weight_decay": setting.weight_decay}
        if math.isfinite(setting.max_grad_norm):
            options["max_grad_norm"] = setting.max_grad_norm
        self.optimizer = prepared(job.row, self.model, job.seed, options)
        self.is_ours = isinstance(self.optimizer, ng.Optimizer)
        self.sums = None
        if "sums" in self.row.options:
            self.sums = Float8Sums(self.model.parameters(), self.row.options["sums"], job.seed)
        self.step = 0
        self.losses: dict[str, float | None] = {}
        self.outliers: dict[str, dict[str, float]] = {}
        self.first_loss = math.nan
        self.rose: int | None = None
        self.alarm = ""
        self.watch = ng.watch(self.model, self.optimizer) if job.watched else None

    def batch(self) -> Tensor:
        """Return the blocks of the next step, which seed and step fix."""
        generator = torch.Generator().manual_seed(1_000_003 * self.job.seed + self.step)
        length = self.setting.length + 1
        size = (self.setting.batch_size, 1)
        places = torch.randint(len(self.start.train) - length, size, generator=generator)
        return self.start.train[places + torch.arange(length)].to(DEVICE)

    def take_step(self) -> None:
        """Take one step."""
        rate = self.setting.rate(self.step, self.job.lr)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        parts = self.batch().chunk(self.setting.micro_batches if self.sums else 1)
        total = 0.0
        for part in parts:
            loss = loss_of(self.model, part, self.is_wide) / len(parts)
            loss.backward()
            total += float(loss.detach())
            if self.sums:
                self.sums.add()
        if self.sums:
            self.sums.give()
        if not self.is_ours and math.isfinite(self.setting.max_grad_norm):
            nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.follow(total)

    def follow(self, loss: float) -> None:
        """Note where the loss left its start, and what the watch says first."""
        if self.step == 1:
            self.first_loss = loss
        if self.rose is None and not loss < self.first_loss + 1:
            self.rose = self.step
        if self.watch is not None:
            with warnings.catch_warnings(record=True) as notices:
                warnings.simplefilter("always")
                self.watch.step(loss)
            for notice in notices:
                self.alarm = self.alarm or f"step {self.step}: {notice.message}"

    def evaluate(self) -> None:
        loss = validation_loss(self.model, self.start.held_out, self.is_wide)
        self.losses[str(self.step)] = loss
        if self.setting.with_outliers:
            self.outliers[str(self.step)] = outliers(self.model, self.start.held_out[:64])
        print(
            self.job.setting, self.job.row, self.job.lr, self.job.seed, self.step, loss, flush=True
        )

    def save(self) -> None:
        """Write a checkpoint, whole or not at all."""
        values = {name: getattr(self, name) for name in self.COUNTED}
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.job.place.parent.mkdir(parents=True, exist_ok=True)
        torch.save(states | {"values": values}, f"{self.job.place}.new")
        Path(f"{self.job.place}.new").rename(f"{self.job.place}.pt")

    COUNTED = ("step", "losses", "outliers", "first_loss", "rose", "alarm")

    def go_on(self) -> None:
        """Continue from the checkpoint, if there is one."""
        place = Path(f"{self.job.place}.pt")
        if place.is_file():
            states = torch.load(place, weights_only=False)
            self.model.load_state_dict(states["model"])
            self.optimizer.load_state_dict(states["optimizer"])
            for name, value in states["values"].items():
                setattr(self, name, value)

    def run(self, keep: bool = True) -> Record:
        """Train to the end."""
        can_go_on = keep and self.is_ours and self.sums is None and self.watch is None
        if can_go_on:
            self.go_on()
        if self.step == 0:
            self.evaluate()
        while self.step < self.setting.steps:
            self.take_step()
            if self.step in (*self.setting.evaluations, self.setting.steps):
                self.evaluate()
                if self.losses[str(self.step)] is None:
                    break
            if can_go_on and self.step % CHECKPOINT_EVERY == 0:
                self.save()
        Path(f"{self.job.place}.pt").unlink(missing_ok=True)
        return self.record()

    def record(self) -> Record:
        edq = None
        if self.is_ours:
            total = ng.audit(self.optimizer).total
            edq = None if total is None or not math.isfinite(total.edq) else total.edq
        return Record(
            self.job.setting,
            self.job.row,
            self.setting.model,
            self.job.lr,
            self.setting.betas[1],
            self.setting.steps,
            self.job.seed,
            self.losses,
            self.start.unigram,
            self.start.bigram,
            bytes_per_param(self.optimizer),
            edq,
            torch.__version__,
            vectors(),
            datetime.now(timezone.utc).date().isoformat(),
            self.rose,
            self.alarm,
            self.outliers,
        )


# ── what enters the last matrix of a block ────────────────────────────────────────────────────────


def outliers(model: nn.Module, blocks: Tensor) -> dict[str, float]:
    """Return the worst inputs of ``down_proj`` over all layers, and what float8 costs there.

    ``max_to_rms`` is the largest magnitude over the root mean square, ``channel_to_median`` the
    largest channel over the median one, ``cosine`` of the two weights that feed the largest channel.
    A compute has its loss less that of bfloat16 for the same weights.
    """
    figures = {"max_to_rms": 0.0, "kurtosis": 0.0, "channel_to_median": 0.0}
    followed: Any = copy.deepcopy(model).eval()
    mlps = {block.mlp.down_proj: block.mlp for block in followed.model.layers}

    def follow(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float().flatten(0, -2)
        squares = x.square()
        ratio = float((squares.max() / squares.mean()).sqrt())
        kurtosis = float(squares.square().mean() / squares.mean() ** 2)
        channels = x.abs().amax(0)
        above = float(channels.max() / channels.median())
        figures["kurtosis"] = max(figures["kurtosis"], kurtosis)
        figures["channel_to_median"] = max(figures["channel_to_median"], above)
        if ratio > figures["max_to_rms"]:
            channel = int(channels.argmax())
            gate = mlps[layer].gate_proj.weight[channel].float()
            up = mlps[layer].up_proj.weight[channel].float()
            figures["max_to_rms"] = ratio
            figures["cosine"] = float(cosine_similarity(gate, up, dim=0))

    hooks = [layer.register_forward_pre_hook(follow) for layer in mlps]
    wide = validation_loss(followed, blocks, False)
    for hook in hooks:
        hook.remove()
    for compute in ("float8-tensor", "float8-row"):
        swapped = copy.deepcopy(followed)
        ng.swap_linears(swapped, compute)
        narrow = validation_loss(swapped, blocks, False)
        figures[compute] = math.nan if wide is None or narrow is None else narrow - wide
    return figures


# ── README's picture ──────────────────────────────────────────────────────────────────────────────


def mean_curve(row: str) -> dict[int, float]:
    """Return the validation loss of a row of the fine-tune at 2e-5, the mean over its seeds."""
    runs = []
    for run in lines():
        if (run["setting"], run["row"], run["lr"]) == ("fine-tune", row, 2e-5):
            runs.append(run["losses"])
    return {int(step): statistics.fmean(run[step] for run in runs) for step in runs[0]}


def drawing(curves: dict[str, dict[int, float]]) -> str:
    """Return an SVG of curves, each with its name at its end."""
    width, height, left, right, low = 720, 320, 60, 250, 40
    steps = sorted({step for curve in curves.values() for step in curve})
    values = [value for curve in curves.values() for value in curve.values()]

    def x(step: float) -> float:
        return left + (step - steps[0]) * (width - left - right) / (steps[-1] - steps[0])

    def y(value: float) -> float:
        return low + (max(values) - value) * (height - 2 * low) / (max(values) - min(values))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="14" viewBox="0 0 {width} {height}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="8" y="20">validation loss</text>',
        f'<path d="M{left} {low - 10}V{height - low}H{width - right}" fill="none" stroke="#444"/>',
    ]
    for step in (steps[0], steps[-1]):
        place = f'x="{x(step):.0f}" y="{height - 20}"'
        parts.append(f'<text {place} text-anchor="middle">{step} steps</text>')
    for value in (min(values), max(values)):
        place = f'x="{left - 8}" y="{y(value) + 5:.0f}"'
        parts.append(f'<text {place} text-anchor="end">{value:.3g}</text>')
    from_the_top = sorted(curves.items(), key=lambda item: -list(item[1].values())[-1])
    free = 0.0
    for (name, curve), color in zip(from_the_top, ("#d9480f", "#868e96", "#1c7ed6"), strict=True):
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve.items())
        last_step, last_value = list(curve.items())[-1]
        free = max(y(last_value) + 5, free + 18)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"/>'
        )
        parts.append(
            f'<text x="{x(last_step) + 8:.0f}" y="{free:.0f}" fill="{color}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


# ── the command ───────────────────────────────────────────────────────────────────────────────────


def train(job: Job, is_quick: bool) -> None:
    """Train a run that has no record of this processor, and append its record."""
    setting = SETTINGS[job.setting]
    if is_quick:
        setting = replace(setting, steps=6, held_out=8, evaluations=())
    elif job.is_recorded():
        return
    start = start_of(setting.model, job.seed, setting.held_out, setting.length)
    record = Training(job, setting, start).run(keep=not is_quick)
    if not is_quick:
        append(record)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("setting", nargs="?", choices=list(SETTINGS))
    flags.add_argument("--row", nargs="+", default=["master", "word"])
    flags.add_argument("--lr", nargs="+", type=float, help="default: the setting's")
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    flags.add_argument("--watch", action="store_true", help="note what ng.watch says first")
    flags.add_argument("--threads", type=int, default=1)
    flags.add_argument("--quick", action="store_true", help="six steps; nothing is kept")
    flags.add_argument("--page", action="store_true", help="draw README's picture of the records")
    options = flags.parse_args(arguments)
    if options.page:
        IMAGE.write_text(drawing({name: mean_curve(row) for name, row in SHOWN.items()}))
        return 0
    if options.setting is None:
        flags.error("name a setting, or --page")
    warnings.simplefilter("ignore", EmulationNotice)
    torch.set_num_threads(options.threads)
    rates = options.lr or [SETTINGS[options.setting].lr]
    for seed, lr, row in itertools.product(options.seeds, rates, options.row):
        train(Job(options.setting, row, lr, seed, options.watch), options.quick)
    return 0


if __name__ == "__main__":
    exit_by(main)
