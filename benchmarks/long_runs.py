"""Measure what lasts of a fine-tune in bfloat16: random low bits, one draw a weight, or stochastic
rounding, one draw a step.

Claim: after the first hundred steps all ways that lose nothing fall alike; plain bfloat16 does not
follow. All rows begin with the same bfloat16 values, see the same batches, and multiply in float32,
so only the optimizer and the way a weight becomes visible part them. A run is a line of
``benchmarks/long_runs.jsonl``.

Model: a Llama of 2.4 million weights, trained here on one half of the standard library's source as
bytes, then fine-tuned on the other half. Batches are 1 × 128 bytes; AdamW, betas 0.9 and 0.999, no
decay; the rate rises for 10 steps, then stays, or falls linearly to 0. ``--model smollm2``
fine-tunes SmolLM2-135M-Instruct instead, as ``finetune.py`` loads it, on 1 × 128 of its tokens;
all rows multiply in bfloat16 there.

Baseline: ``master``: a float32 copy of each bfloat16 weight with zero low bits, float32 moments.

Run: ``./dev bench long_runs [--row ROW ...] [--lr 1e-5] [--steps 1000] [--seeds 0 1 2] [--falls]
[--model smollm2]`` trains what has no record. ``docs/evidence.py`` prints the records. Rows:

- a storage of ours, alone (low bits zero) or with `` random``;
- ``autocast`` or ``autocast random``: torch AdamW on float32 weights, seen in bfloat16;
- ``masters seen stochastically``: the same, rounded at random at each step (llm.c, SimpleTuner);
- a peer of ``peers.py``; a published formula with random low bits (``published/flashoptim``).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import random
import statistics
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _others_training import FORMULAS, PEERS, cut, formula_bytes
from finetune import append, draw_low_bits, start_of
from peers import bytes_held
from torch import Tensor, nn

import narrowgauge as ng

FILE = Path(__file__).with_name("long_runs.jsonl")
PRETRAINED = Path("runs/long_runs/pretrained.pt")
SMALL = "llama-2m"
MODELS = (SMALL, "smollm2")
MASTER = "master"
STOCHASTICALLY = "masters seen stochastically"
ROWS = (
    MASTER,
    "autocast random",
    STOCHASTICALLY,
    "word",
    "word random",
    "compact random",
    "states8 random",
    "stochastic",
    "torchao AdamW8bit stochastic",
    "optimi AdamW Kahan",
    "published/flashoptim random",
    "torchao AdamW8bit",
    "torch AdamW bfloat16",
)
LENGTH = 128
HELD_OUT = 64
EVALUATIONS = (25, 50, 100, 200, 400, 600, 800, 1000, 1500, 2000, 2500, 3000)
BETAS = (0.9, 0.999)
Job = tuple[str, str, float, int, int, bool]
"""Of a run: model, row, rate, steps, seed, and whether the rate falls."""


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        losses: validation loss, nats per byte, before the first step and after some others.
        distance: of the visible weights from ``master``'s at the end of the same seed, over how far
            ``master``'s moved (root mean squares); ``None`` without such a run.
        changed: part of the visible weights that the last step changed.
        bytes_per_param: weight, gradient and states.
    """

    row: str
    lr: float
    steps: int
    seed: int
    falls: bool
    losses: dict[str, float]
    distance: float | None
    changed: float
    bytes_per_param: float
    model: str = SMALL

    @property
    def key(self) -> Job:
        return self.model, self.row, self.lr, self.steps, self.seed, self.falls


def records() -> dict[Job, Run]:
    """Return the runs of the file."""
    if FILE.is_file():
        lines = FILE.read_text().splitlines()
    else:
        lines = []
    runs = [Run(**json.loads(line)) for line in lines]
    return {run.key: run for run in runs}


# ── the model and its text ────────────────────────────────────────────────────────────────────────


def new_model() -> nn.Module:
    """Return the model with its first weights, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=3,
        num_key_value_heads=3,
    )
    return LlamaForCausalLM(config)


def text_halves() -> tuple[Tensor, Tensor]:
    """Return blocks of bytes of two halves of the standard library, ``[blocks, LENGTH]``."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(files)
    halves = []
    for part in (files[::2], files[1::2]):
        text = b"".join(file.read_bytes() for file in part)
        text = text[: len(text) // LENGTH * LENGTH]
        blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8).view(-1, LENGTH).long()
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
        halves.append(blocks[order])
    return halves[0], halves[1]


def loss_of(model: nn.Module, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the loss of the model with these weights; of a model with a large vocabulary with
    products in bfloat16.
    """
    named = {"input_ids": tokens, "labels": tokens}
    is_large = model.config.vocab_size > 256
    with torch.autocast("cpu", torch.bfloat16, enabled=is_large):
        result = torch.func.functional_call(model, weights, args=(), kwargs=named)
    loss: Tensor = result.loss
    return loss


def pretrained(blocks: Tensor, steps: int = 1500) -> nn.Module:
    """Return the trained model with bfloat16 values in float32; train it where it is missing."""
    model = new_model()
    if not PRETRAINED.is_file():
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), fused=True)
        falling = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
        for step in range(steps):
            first = step * 16 % (len(blocks) - 16)
            tokens = blocks[first : first + 16]
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            falling.step()
            optimizer.zero_grad()
            if step % 100 == 0:
                print("pretraining", step, round(loss.item(), 4), flush=True)
        PRETRAINED.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), PRETRAINED)
    model.load_state_dict(torch.load(PRETRAINED))
    return rounded(model)


def rounded(model: nn.Module) -> nn.Module:
    """Return the model with the nearest bfloat16 values, in float32."""
    ng.cast_parameters(model, torch.bfloat16)
    return ng.cast_parameters(model, torch.float32)


def start(name: str) -> tuple[nn.Module, Tensor]:
    """Return a model of :data:`MODELS` and the blocks of its fine-tune, ``[blocks, LENGTH]``."""
    if name == SMALL:
        first, second = text_halves()
        return pretrained(first), second
    loaded = start_of()
    blocks = torch.cat([loaded.train, loaded.held_out])
    return rounded(loaded.model), blocks.view(-1, LENGTH)


# ── a run ─────────────────────────────────────────────────────────────────────────────────────────


class Seen(torch.autograd.Function):
    """Round to bfloat16, to the nearest value or at random, and the gradient to the nearest."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, generator: torch.Generator | None) -> Tensor:
        if generator is None:
            return weight.bfloat16().float()
        words = weight.view(torch.int32)
        noise = torch.randint(0, 1 << 16, words.shape, dtype=torch.int32, generator=generator)
        return ((words + noise) & ~0xFFFF).view(torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].bfloat16().float(), None


def visible(model: nn.Module, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Return what the forward pass multiplies by, in float32, with its graph: bfloat16 weights as
    they are, and others rounded to bfloat16, at random with a generator.
    """
    seen = {}
    for name, p in model.named_parameters():
        seen[name] = p.float() if p.dtype == torch.bfloat16 else Seen.apply(p, generator)
    return seen


class Trained:
    """A copy of the model, its optimizer, and what its forward pass sees."""

    def __init__(self, row: str, model: nn.Module, lr: float, seed: int) -> None:
        name = row.removesuffix(" random")
        self.formula = FORMULAS.get(name)
        self.generator = None
        if row == STOCHASTICALLY:
            self.generator = torch.Generator().manual_seed(seed)
        self.is_wide = row == STOCHASTICALLY or name == "autocast"
        self.is_random = row.endswith(" random")
        self.model = copy.deepcopy(model)
        if not self.is_wide:
            ng.cast_parameters(self.model, torch.bfloat16)
        elif self.is_random:
            draw_low_bits(self.model, seed)
        options: dict[str, Any] = {"lr": lr, "betas": BETAS, "weight_decay": 0.0}
        if self.is_wide:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **options, fused=True)
        elif row in PEERS:
            self.optimizer = PEERS[row].make(self.model.parameters(), **options, eps=1e-8)
        else:
            self.optimizer = ng.AdamW(
                self.model.named_parameters(),
                storage=MASTER if self.formula else name,
                low_bits="random" if self.is_random else "zero",
                seed=seed,
                **options,
            )

    def visible(self) -> dict[str, Tensor]:
        """Return what the forward pass multiplies by."""
        return visible(self.model, self.generator)

    def step(self, rate: float, tokens: Tensor) -> None:
        """Take one step."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        loss_of(self.model, self.visible(), tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.formula is not None:
            cut(self.formula, self.optimizer)

    def bytes_per_param(self) -> float:
        """Return the bytes of weight, gradient and states."""
        if self.formula is not None:
            return formula_bytes(self.formula, self.optimizer)
        if self.is_wide:
            return 16.0
        if isinstance(self.optimizer, ng.AdamW):
            return float(self.optimizer.bytes_per_param())
        return bytes_held(self.optimizer)


@torch.no_grad()
def validation_loss(trained: Trained, blocks: Tensor) -> float:
    """Return the loss of what the forward pass sees."""
    weights = trained.visible()
    losses = [loss_of(trained.model, weights, part).item() for part in blocks.split(16)]
    return statistics.fmean(losses)


@torch.no_grad()
def flat(trained: Trained) -> Tensor:
    """Return the visible weights in one vector."""
    return torch.cat([p.flatten() for p in trained.visible().values()])


def master_file(job: Job) -> Path:
    """Return where the last visible weights of a job's ``master`` are kept, for the distance."""
    model, _, lr, steps, seed, falls = job
    return PRETRAINED.with_name(f"master-{model}-{lr:g}-{steps}-{seed}-{falls}.pt")


def fine_tuned(job: Job, model: nn.Module, blocks: Tensor) -> Run:
    """Fine-tune once and return the record."""
    name, row, lr, steps, seed, falls = job
    trained = Trained(row, model, lr, seed)
    held_out = blocks[-HELD_OUT:]
    train = blocks[:-HELD_OUT]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed + 1))
    losses = {"0": validation_loss(trained, held_out)}
    changed = math.nan
    for step in range(steps):
        rate = lr * min(1.0, (step + 1) / 10)
        if falls:
            rate *= 1 - step / steps
        before = None
        if step + 1 == steps:
            before = flat(trained)
        place = int(order[step % len(order)])
        trained.step(rate, train[place : place + 1])
        if before is not None:
            changed = (flat(trained) != before).double().mean().item()
        if step + 1 in (*EVALUATIONS, steps):
            losses[str(step + 1)] = validation_loss(trained, held_out)
    last = flat(trained)
    masters_file = master_file(job)
    if row == MASTER:
        masters_file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(last, masters_file)
    distance = None
    if masters_file.is_file():
        master = torch.load(masters_file)
        first = torch.cat([p.detach().flatten() for p in model.parameters()])
        distance = ((last - master).norm() / (master - first).norm()).item()
    size = trained.bytes_per_param()
    return Run(row, lr, steps, seed, falls, losses, distance, changed, size, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--row", nargs="+", default=ROWS)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5])
    parser.add_argument("--steps", type=int, nargs="+", default=[1000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", choices=MODELS, default=SMALL)
    parser.add_argument("--falls", action="store_true", help="let the rate fall to 0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, blocks = start(args.model)
    for steps, seed, lr, row in itertools.product(args.steps, args.seeds, args.lr, args.row):
        job = (args.model, row, lr, steps, seed, args.falls)
        if job in records():
            continue
        run = fine_tuned(job, model, blocks)
        append(run, FILE)
        print(row, lr, steps, seed, run.losses, flush=True)


if __name__ == "__main__":
    main()
