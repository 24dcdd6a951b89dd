"""Programs: the training loop that a plan describes. Memory and time read the same description.

A named program is a row of ``data/programs.toml`` with its source: how fast its step is, and what
it keeps in memory. It never decides what can run: other programs change within a year. A program
has a table of the model's parts: how each is stored, and whether it trains. Adapters, quantized
bases, trained heads and reference models are rows of this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from narrowgauge.errors import RecipeError, suggestion_or_all
from narrowgauge.planner.layouts import read_fields
from narrowgauge.planner.shapes import Architecture, Weight
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.sums import ACCUMULATION_DTYPES
from narrowgauge.spec.toml import load_data
from narrowgauge.spec.update_rules import Choice

FROZEN_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "int8": 8.0, "nf4": 4 + 8 / 64 + 32 / (64 * 256),
               "nvfp4": 4.5}  # fmt: skip
"""Bits of a frozen weight, scales included.

NF4 has 8-bit scales of 64 weights, and float32 scales of 256 of these (QLoRA, arXiv 2305.14314,
section 3).
"""
_NARROW = ("int8", "nf4", "nvfp4")
BASES = ("bfloat16", *_NARROW)
"""Formats of ``--base``."""
PARTS = ("attention", "mlp", "experts", "embeddings", "head", "norms", "reference")
"""Parts of a model. ``reference`` is a frozen copy of all others, as DPO and GRPO keep it."""
_REST = "rest"
CHUNKS = 8
"""Chunks of the tokens in a chunked loss: torchtitan's default."""


class Part(NamedTuple):
    """Describe how a part of a model is stored.

    Args:
        dtype: of a frozen weight; empty for that of the storage.
        trains: has gradients and optimizer states.
        rank: of the adapters on its matrices; 0 without adapters.
    """

    dtype: str = ""
    trains: bool = True
    rank: int = 0

    @property
    def bytes(self) -> float:
        """Return the bytes of a frozen weight; 0 for the storage's."""
        return FROZEN_BITS[self.dtype] / 8 if self.dtype else 0.0

    @property
    def is_narrow(self) -> bool:
        """Tell whether its matmuls dequantize it first."""
        return self.dtype in _NARROW

    def __str__(self) -> str:
        """Write the part as :func:`read_part` reads it."""
        words = "trained" if self.trains else self.dtype
        return f"{words}+lora{self.rank}" if self.rank else words


_TRAINED = Part()


def read_part(text: str) -> Part:
    """Read ``DTYPE``, ``frozen``, ``trained`` and ``loraR``, joined by ``+``.

    A dtype is that of a frozen weight. ``lora16`` puts adapters of rank 16 on its matrices.
    """
    problem = f"Cannot store a part of a model as {text!r}"
    accepted = (*FROZEN_BITS, "frozen", "trained")
    dtype = ""
    rank = 0
    words = text.split("+")
    for word in words:
        digits = word.removeprefix("lora")
        if digits != word and digits.isdecimal() and int(digits):
            rank = int(digits)
        elif word not in accepted:
            advice = suggestion_or_all(word, accepted)
            raise RecipeError(f"{problem} because {word!r} is unknown.", advice)
        elif word in FROZEN_BITS:
            if dtype or "trained" in words:
                raise RecipeError(
                    f"{problem}: what trains is stored as its recipe says.",
                    "Name one format of a frozen part, or 'trained'.",
                )
            dtype = word
    if not (dtype or rank or "frozen" in words):
        return Part()
    return Part(dtype or "bfloat16", False, rank)


def adapters(rank: int, base: str) -> dict[str, Part]:
    """Return the parts of a model with adapters of a rank over weights frozen in a format.

    Experts stay in bfloat16: transformers holds them in one tensor, which bitsandbytes does not
    quantize. Beside a narrow base, a program may widen what is outside the layers
    (``Program.rest``).
    """
    outside = Part(_REST if base in _NARROW else "bfloat16", False)
    layers = Part(base, False, rank=rank)
    parts = {"attention": layers, "mlp": layers, "experts": Part("bfloat16", False)}
    return {**parts, **dict.fromkeys(("embeddings", "head", "norms"), outside)}


@dataclass(frozen=True, slots=True)
class Program:
    """Describe a training loop.

    Args:
        kernels: of layers: one operation after the other, compiled by layer, or fused by hand
            (Megatron-Core, Liger).
        loss: over all logits in eager operations, over all logits compiled, or in chunks of the
            tokens.
        head: dtype of the logits; empty for the matmuls' dtype.
        selective: what a layout with ``recompute = "selective"`` repeats: scores of unfused
            attention; all but attention and every second matmul (torchtitan); or norms, gates and
            up-projections of latents (DeepSeek-V3).
        attention: a flash kernel, which saves no scores, or matmuls around a softmax.
        gathered: dtype of gathered float32 shards under FSDP; empty for float32 under autocast.
        reduced: dtype of the gradients that FSDP reduces, if ``gathered`` is set.
        sums: dtype of the gradient sum over micro-batches; ``"weight"`` for the parameter's.
        release: each layer's gradient is freed after its update, within backward.
        offload: gradients, optimizer states and their update are on the host.
        saved: place of the inputs that recomputed layers keep: the chip, or ``"host"``.
        rest: dtype of frozen embeddings, head and norms beside a narrow base.
        parts: the table of the model's parts, by name; what is not in it trains.
        text, source: its name in sentences, and where the fields are from.
        ours: whether it takes this project's optimizers; else ``master`` is planned by default.
        factor, speed: the speed over a compiled loop's, and further efficiencies that differ.
    """

    name: str
    kernels: str = "compiled"
    loss: str = "compiled"
    head: str = ""
    selective: str = "attention"
    attention: str = "flash"
    gathered: str = ""
    reduced: str = "float32"
    sums: str = "float32"
    release: bool = False
    offload: bool = False
    saved: str = ""
    rest: str = "bfloat16"
    parts: tuple[tuple[str, Part], ...] = ()
    ours: bool = True
    factor: float = 1.0
    speed: Mapping[str, float] = field(default_factory=dict, hash=False)
    text: str = field(default="", compare=False)
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name, values in _VALUES.items():
            Choice(values).check(name, getattr(self, name))

    def part(self, name: str) -> Part:
        """Return the row of a part of the model."""
        for part, row in self.parts:
            if part == name:
                return row._replace(dtype=self.rest) if row.dtype == _REST else row
        return _TRAINED

    def part_of(self, weight: Weight) -> Part:
        """Return the row of a weight. A router is stored like attention."""
        if weight.is_expert:
            return self.part("experts")
        return self.part("attention" if weight.part == "experts" else weight.part)

    @property
    def reference(self) -> Part | None:
        """Return the row of a frozen copy of the model; None without one."""
        return dict(self.parts).get("reference")

    @property
    def has_adapters(self) -> bool:
        return any(row.rank for _, row in self.parts)

    @property
    def trains_all(self) -> bool:
        """Tell whether every part of the model trains."""
        return all(row.trains for name, row in self.parts if name != "reference")

    def logit_bytes(self, width: float) -> float:
        """Return the bytes per logit at the peak of the loss.

        ``width`` is that of the matmuls' dtype.

        A compiled loss keeps the logits and their gradient. An eager loss also has float32 logits,
        their log-softmax and its gradient, 12 bytes, while the allocator still reserves the logits.
        """
        if self.head:
            width = 4.0 if self.head == "float32" else 2.0
        if self.loss == "compiled":
            return 2 * width
        return (12 + width) / (CHUNKS if self.loss == "chunked" else 1)

    def __str__(self) -> str:
        """Write the program with its fields, as ``--program`` takes them, and its parts."""
        words = []
        for name in _VALUES:
            value = getattr(self, name)
            if value:
                words.append(f"{name}={value}")
        for name, _ in self.parts:
            words.append(f"{name}={self.part(name)}")
        return f"{self.text}: {', '.join(words)}"


def adapters_of(a: Architecture, program: Program) -> Iterator[Weight]:
    """Yield both matrices of each adapter, ``[rank, in_features]`` and ``[out_features, rank]``."""
    if not program.has_adapters:
        return
    for m in a.matmuls:
        rank = 0 if m.part == "experts" else program.part_of(m).rank
        if rank:
            first = replace(m, name=f"{m.name}.lora_A", split="none", has_bias=False)
            yield replace(first, out_features=rank)
            yield replace(first, name=f"{m.name}.lora_B", in_features=rank)


_VALUES: dict[str, tuple[Any, ...]] = {
    "kernels": ("eager", "compiled", "fused"), "loss": ("whole", "compiled", "chunked"), "head": ("", "bfloat16", "float32"),
    "selective": ("attention", "operations", "modules"), "attention": ("flash", "eager"), "gathered": ("", "bfloat16"),
    "reduced": ("bfloat16", "float32"), "sums": ("weight", *ACCUMULATION_DTYPES), "release": (False, True),
    "offload": (False, True), "saved": ("", "host"), "rest": tuple(FROZEN_BITS),
}  # fmt: skip
PROGRAMS: dict[str, Program] = {
    name: Program(name, **row) for name, row in load_data("programs", "planner").items()
}
"""Programs by name. The first is the default."""
DEFAULT = PROGRAMS["compiled"]


def program_on(chip: Chip, *, has_adapters: bool) -> str:
    """Return the name of the program that is planned where none is named."""
    if chip.vendor == "Google":
        return "maxtext"
    return "hf-trainer" if has_adapters else "compiled"


def read_program(text: str | Program) -> Program:
    """Read a program: a name of ``PROGRAMS``, fields with values, or both, between commas."""
    if isinstance(text, Program):
        return text
    advice = f"There are {', '.join(PROGRAMS)}."
    name, fields = read_fields(text, "program", PROGRAMS, _VALUES, advice)
    for key, value in fields.items():
        fields[key] = {"true": True, "false": False}.get(value, value)
    return replace(PROGRAMS.get(name, DEFAULT), **fields)


def with_parts(program: Program, parts: Mapping[str, str | Part]) -> Program:
    """Return a program with rows of its table of parts replaced.

    Args:
        parts: rows, or texts of :func:`read_part`, by name of a part.
    Raises:
        RecipeError: an unknown part, or nothing that trains.
    """
    if not parts:
        return program
    rows = dict(program.parts)
    for name, row in parts.items():
        if name not in PARTS:
            advice = suggestion_or_all(name, PARTS)
            raise RecipeError(f"Cannot plan a part named {name!r}.", advice)
        if not isinstance(row, str | Part):
            problem = f"Cannot store the part {name!r} as {row!r}."
            raise RecipeError(problem, "Name a format, as 'nf4'.")
        part = read_part(row) if isinstance(row, str) else row
        if name == "reference" and part.trains:
            problem = "Cannot train the reference: it is a frozen copy."
            raise RecipeError(problem, "Name its format, as 'bfloat16'.")
        rows[name] = part
    result = replace(program, parts=tuple(rows.items()))
    weights = [result.part(name) for name in PARTS if name != "reference"]
    if not any(row.trains or row.rank for row in weights):
        raise RecipeError(
            "Cannot plan training of a model because all its parts are frozen.", "Name --lora."
        )
    return result
