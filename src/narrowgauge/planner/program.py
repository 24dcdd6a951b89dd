"""Programs: the training loop that a plan describes. Memory and time read the same description.

A named program is a row of ``data/programs.toml`` with its source: how fast its step is, and what
it keeps in memory. It never decides what can run: other programs change within a year. ``Tuning``
says what trains: everything, or adapters over frozen weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from narrowgauge.errors import RecipeError
from narrowgauge.planner.layouts import read_values
from narrowgauge.planner.shapes import Architecture, WeightShape
from narrowgauge.spec.require import require_choice, require_number
from narrowgauge.spec.toml import load_data, load_rows, refuse_unknown

FROZEN_BITS = {"bfloat16": 16.0, "int8": 8.0, "nf4": 4 + 8 / 64 + 32 / (64 * 256)}
"""Bits of a frozen weight, scales included.

NF4 has 8-bit scales of 64 weights, and float32 scales of 256 of these (QLoRA, arXiv 2305.14314,
section 3).
"""


LOSSES = load_data("losses", "planner")
"""Losses by name, with the bytes of a logit that each keeps and moves."""
_CHOICES = {
    "kernels": ("eager", "compiled"),
    "loss": tuple(LOSSES),
    "release": (False, True),
    "offload": (False, True),
    "saves": ("chip", "host"),
}
"""Fields of a program that ``--program`` takes, and their values."""


@dataclass(frozen=True, slots=True)
class Program:
    """Describe a training loop.

    Args:
        factor: speed of the step over that of a compiled PyTorch loop on the same chip.
        mixture_seconds: wait of a mixture's layer for its router and launches, forward or backward.
        kernels: of layers: one operation after the other, or compiled by layer or fused by hand.
        loss: over all logits in eager operations, compiled or fused, or in chunks.
        release: each layer's gradient is freed after its update, within backward.
        offload: gradients, optimizer states and their update are on the host, and with adapters
            the frozen weights too.
        saves: where the inputs of recomputed layers wait for their backward pass.
        layout: fields of the layouts that it runs, where the question names none.
        ours: whether it takes this project's optimizers; else ``master`` is planned by default.
    """

    name: str
    factor: float = 1.0
    mixture_seconds: float = 3e-3
    kernels: str = "compiled"
    loss: str = "compiled"
    release: bool = False
    offload: bool = False
    saves: str = "chip"
    layout: str = ""
    ours: bool = True

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            require_choice(name, getattr(self, name), choices)
        require_number("factor", self.factor, is_open=True)

    def __str__(self) -> str:
        """Write the program with its fields, as ``--program`` takes them."""
        words = [f"{name}={getattr(self, name)}" for name in _CHOICES if getattr(self, name)]
        return f"{self.name}: {', '.join(words)}"


@dataclass(frozen=True, slots=True)
class Tuning:
    """Describe what trains: everything, or adapters over frozen weights.

    Args:
        lora: rank of the adapters on attention and MLP; 0 without adapters, when all weights train.
        base: format of the frozen weights in the layers.
        experts: format of frozen experts. transformers holds them in one tensor, which bitsandbytes
            does not quantize.
    """

    lora: int = 0
    base: str = "bfloat16"
    experts: str = "bfloat16"

    def __post_init__(self) -> None:
        require_number("lora", self.lora, is_whole=True)
        require_choice("base", self.base, FROZEN_BITS)
        require_choice("experts", self.experts, FROZEN_BITS)
        if not self.lora and {self.base, self.experts} != {"bfloat16"}:
            raise RecipeError(
                "Cannot store weights in fewer bits because they train.",
                "Train adapters over them: --lora 16.",
            )

    def frozen_bytes(self, weight: WeightShape) -> float:
        """Return the bytes of each element of a weight that stays frozen; 0 without adapters."""
        if not self.lora:
            return 0.0
        if weight.is_expert:
            return FROZEN_BITS[self.experts] / 8
        return FROZEN_BITS[self.base] / 8 if weight.part in ("attention", "mlp") else 2.0

    def adapters(self, a: Architecture) -> Iterator[WeightShape]:
        """Yield both matrices of each adapter, ``[rank, in]`` and ``[out, rank]``."""
        for m in a.layer_matmuls:
            if self.lora and m.part in ("attention", "mlp"):
                yield replace(m, out_features=self.lora)
                yield replace(m, in_features=self.lora)


EVERYTHING = Tuning()
PROGRAMS = load_rows(Program, "programs", "planner")
"""Programs by name. The first is the default."""
DEFAULT = PROGRAMS["compiled"]


def read_program(text: str | Program) -> Program:
    """Read a program: a name of ``PROGRAMS``, fields with values, or both, between commas."""
    if isinstance(text, Program):
        return text
    words = str(text or DEFAULT.name).split(",")
    name = DEFAULT.name if "=" in words[0] else words.pop(0).strip()
    require_choice("program", name, PROGRAMS)
    fields = read_values(words)
    refuse_unknown(fields, _CHOICES, "a program", RecipeError)
    return replace(PROGRAMS[name], **fields)
