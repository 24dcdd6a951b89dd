"""One AdamW step of every storage, against torch's fused float32 AdamW.

Claim: a step costs what it moves. A float32 AdamW moves 28 bytes per element, ``word`` 14, so the narrow storages are
not only smaller but faster; and many small tensors cost no more than a few large ones. Cases: one tensor of 32 M
elements, 200 tensors of 4 to 64 K elements (some of odd length), and the tensors of a llama-125m.

Baseline: ``torch.optim.AdamW(fused=True)`` over float32 parameters and gradients, in the same rounds. Beside it
``add_`` over as many float32 elements (12 bytes each: what the memory can do), the quick optimizers of ``peers.py``, and
with ``--peers`` the slow ones (one round each).

Run: ``./dev bench optimizer_step [--peers] [--quick]``. Gradients are there before the step and never change; the
audit is off (``audit_cost.py`` measures it); kernels are compiled before the first round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from peers import PACKAGES, PEERS, Peer, reason
from timing import NOT_INSTALLED, Contender, Report, Timing, measure, parser, peer_version
from torch import nn

import narrowgauge as ng
from narrowgauge.spec.models import get_model
from narrowgauge.spec.storages import STORAGES

Shapes = tuple[tuple[int, ...], ...]
BASELINE = "torch fused float32"
MEMORY_BYTES = 6 << 30
"""Contenders are timed in groups, each with the baseline, so that what they hold together fits."""
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Case:
    """Tensors to step."""

    name: str
    shapes: Shapes

    @property
    def num_elements(self) -> int:
        """Of all tensors together."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def title(self) -> str:
        """What the table says above itself."""
        tensors = "1 tensor" if len(self.shapes) == 1 else f"{len(self.shapes)} tensors"
        return f"{self.name}: {tensors}, {self.num_elements:,} elements"


@cache
def model_shapes(name: str) -> Shapes:
    """The shapes of a preset model's parameters; nothing is allocated."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    row = get_model(name)
    config = LlamaConfig(
        vocab_size=row.vocab_size,
        hidden_size=row.hidden_size,
        intermediate_size=row.intermediate_size,
        num_hidden_layers=row.num_layers,
        num_attention_heads=row.num_heads,
        num_key_value_heads=row.num_kv_heads,
        tie_word_embeddings=row.tie_embeddings,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = tuple(tuple(p.shape) for p in model.parameters())
    assert sum(torch.Size(shape).numel() for shape in shapes) == row.num_parameters
    return shapes


def small_shapes(count: int) -> Shapes:
    """``count`` shapes of 4 to 64 K elements, spread evenly in no order; every fiftieth has an odd length."""
    shapes: list[tuple[int, ...]] = []
    for k in range(count):
        length = 4096 + k * 12_289 % count * (65_536 - 4096) // count
        shapes.append((length | 1,) if k % 50 == 0 else (length // 64, 64))
    # Vectors would follow the row of vectors, and the case is about matrices.
    return tuple((1, *shape) if len(shape) == 1 else shape for shape in shapes)


def cases(quick: bool) -> dict[str, Case]:
    """The cases of the claim, by letter."""
    if quick:
        return {
            "a": Case("one tensor", ((512, 512),)),
            "b": Case("small tensors", small_shapes(20)),
            "c": Case("llama-1m", model_shapes("llama-1m")),
        }
    return {
        "a": Case("one tensor", ((1 << 13, 1 << 12),)),
        "b": Case("small tensors", small_shapes(200)),
        "c": Case("llama-125m", model_shapes("llama-125m")),
    }


def make_parameters(shapes: Shapes, dtype: torch.dtype, device: str = "cpu") -> list[nn.Parameter]:
    """Gaussian weights with gradients that stay as they are."""
    generator = torch.Generator(device).manual_seed(0)
    parameters = []
    for shape in shapes:
        parameter = nn.Parameter((torch.randn(shape, generator=generator, device=device) * 0.02).to(dtype))
        parameter.grad = (torch.randn(shape, generator=generator, device=device) * 1e-3).to(dtype)
        parameters.append(parameter)
    return parameters


def ours(
    shapes: Shapes, storage: str, *, audit_every: int = 0, device: str = "cpu", max_grad_norm: float | None = None
) -> ng.AdamW:
    """Our AdamW over fresh parameters, compiled."""
    parameters = make_parameters(shapes, getattr(torch, STORAGES[storage].visible), device)
    return ng.AdamW(
        parameters, **OPTIONS, storage=storage, audit_every=audit_every, max_grad_norm=max_grad_norm, compile=True
    )


def fused(shapes: Shapes, device: str = "cpu") -> torch.optim.Optimizer:
    """The baseline."""
    return torch.optim.AdamW(make_parameters(shapes, torch.float32, device), **OPTIONS, fused=True)


@dataclass(frozen=True)
class Entry:
    """A contender that is not made yet: its name, the bytes per element that it will hold, and the call that makes it."""

    name: str
    bytes_per_element: float
    make: Callable[[Shapes, str], Contender]
    package: str = "narrowgauge"
    slow: bool = False


def _our_entry(storage: str) -> Entry:
    def make(shapes: Shapes, name: str) -> Contender:
        return Contender(name, ours(shapes, storage).step)

    return Entry(f"ours {storage}", STORAGES[storage].bytes_per_param, make)


def _adder(shapes: Shapes, name: str) -> Contender:
    length = sum(torch.Size(shape).numel() for shape in shapes)
    total, addend = torch.zeros(length), torch.full((length,), 1e-3)
    return Contender(name, lambda: total.add_(addend))


def peer_contender(peer: Peer, shapes: Shapes, rounds: int | None, device: str = "cpu") -> Contender:
    """A peer over fresh bfloat16 parameters, which takes part in so many rounds."""
    parameters = make_parameters(shapes, torch.bfloat16, device)
    gradients = [p.grad for p in parameters if p.grad is not None]
    # Gradients left as an optimizer spoils them would shrink to subnormals, which are slow.
    originals = [g.clone() for g in gradients] if peer.spoils_gradients else []

    def restore() -> None:
        for gradient, original in zip(gradients, originals, strict=False):
            gradient.copy_(original)

    return Contender(peer.name, peer.make(parameters, **OPTIONS).step, before=restore, rounds=rounds)


def _peer_entry(peer: Peer) -> Entry:
    def make(shapes: Shapes, name: str) -> Contender:
        return peer_contender(peer, shapes, 1 if peer.slow else None)

    held = peer.bytes_per_param + (2 if peer.spoils_gradients else 0)
    return Entry(peer.name, held, make, peer.package, peer.slow)


ENTRIES = (*map(_our_entry, STORAGES), Entry("add_ of float32", 8, _adder), *map(_peer_entry, PEERS))


def obstacle(entry: Entry) -> str | None:
    """Why a contender cannot take part: not installed, or its first step fails here; ``None`` where it can."""
    if peer_version(entry.package) == NOT_INSTALLED:
        return NOT_INSTALLED
    if entry.package in PACKAGES:  # somebody else's kernels may need what this machine lacks
        try:
            entry.make(((64, 64),), entry.name).run()
        except (ImportError, RuntimeError) as error:
            return reason(error)
    return None


def grouped(waiting: Sequence[Entry], num_elements: int) -> Iterator[list[Entry]]:
    """Entries in groups that fit the memory, the baseline's 16 bytes per element included."""
    group: list[Entry] = []
    total = 16.0
    for entry in waiting:
        if group and (total + entry.bytes_per_element) * num_elements > MEMORY_BYTES:
            yield group
            group, total = [], 16.0
        group.append(entry)
        total += entry.bytes_per_element
    yield group


def time_case(case: Case, waiting: Sequence[Entry], rounds: int) -> list[Timing]:
    """Time all entries of one case; of the baseline, the times of every group together."""
    timings: list[Timing] = []
    baseline: list[float] = []
    for group in grouped(waiting, case.num_elements):
        contenders = [Contender(BASELINE, fused(case.shapes).step)]
        contenders += [entry.make(case.shapes, entry.name) for entry in group]
        first, *others = measure(contenders, baseline=BASELINE, rounds=rounds)
        del contenders
        baseline += first.seconds
        timings += others
    return [Timing(BASELINE, tuple(baseline), 1.0, (1.0, 1.0), 1.0), *timings]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=25)
    flags.add_argument("--peers", action="store_true", help="the slow peers too, which take minutes")
    flags.add_argument("--case", choices=("a", "b", "c"), action="append", help="only these (default: all)")
    options = flags.parse_args(arguments)
    rounds = 3 if options.quick else options.rounds
    report = Report("optimizer step", options, peers=PACKAGES)
    wanted = [entry for entry in ENTRIES if options.peers or not entry.slow]
    obstacles = {entry.name: obstacle(entry) for entry in wanted}
    waiting = [entry for entry in wanted if obstacles[entry.name] is None]
    for letter, case in cases(options.quick).items():
        if options.case is None or letter in options.case:
            rows = [timing.row() for timing in time_case(case, waiting, rounds)]
            rows += [{"": name, "quartiles": why} for name, why in obstacles.items() if why]
            report.add(f"({letter}) {case.title}; ratio to {BASELINE}", rows)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
