"""Programs: the training loop that a plan describes. Memory and time read the same description.

A named program is a row of ``data/programs.toml`` with its source, and the limits of what it runs.
``compiled`` has no limits. A program has a table of the model's parts: how each is stored, where,
and whether it trains. Adapters, quantized bases, trained heads and reference models are rows of
this table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.planner.layouts import read_fields, refuse_others
from narrowgauge.planner.model import Architecture, Matmul
from narrowgauge.spec.sums import ACCUMULATION_DTYPES
from narrowgauge.spec.toml import load_data

FROZEN_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "int8": 8.0, "nf4": 4 + 8 / 64 + 32 / (64 * 256),
               "nvfp4": 4.5}  # fmt: skip
"""Bits of a frozen weight, scales included.

NF4 has 8-bit scales of 64 weights, and float32 scales of 256 of these (QLoRA, arXiv 2305.14314,
section 3).
"""
BASES = ("bfloat16", "int8", "nf4", "nvfp4")
"""Formats of ``--base``."""
PARTS = ("attention", "mlp", "experts", "embeddings", "head", "norms", "reference")
"""Parts of a model. ``reference`` is a frozen copy of all others, as DPO and GRPO keep it."""


class Part(NamedTuple):
    """Describe how a part of a model is stored.

    Args:
        dtype: of a frozen weight; empty for that of the storage.
        trains: has gradients and optimizer states.
        host: lies in the host's memory, and comes to the chip when it is used.
    """

    dtype: str = ""
    trains: bool = True
    host: bool = False

    @property
    def bytes(self) -> float:
        """Return the bytes of a frozen weight; 0 for the storage's."""
        return FROZEN_BITS[self.dtype] / 8 if self.dtype else 0.0

    @property
    def is_narrow(self) -> bool:
        """Tell whether its matmuls dequantize it first."""
        return self.dtype in ("int8", "nf4", "nvfp4")


def read_part(text: str) -> Part:
    """Read ``DTYPE``, ``frozen``, ``trained`` and ``host``, joined by ``+``.

    A dtype is that of a frozen weight.
    """
    words = text.split("+")
    for word in words:
        known = (*FROZEN_BITS, "frozen", "trained", "host")
        if word not in known:
            raise RecipeError(
                f"Cannot store a part of a model as {text!r} because {word!r} is unknown.",
                suggestion(word, known) or f"There are {', '.join(known)}, joined by +.",
            )
    dtypes = [word for word in words if word in FROZEN_BITS]
    is_trained = "trained" in words
    if len(dtypes) > 1 or (dtypes and is_trained):
        raise RecipeError(
            f"Cannot store a part of a model as {text!r}: what trains is stored as its recipe "
            "says.",
            "Name one format of a frozen part, or 'trained'.",
        )
    dtype = dtypes[0] if dtypes else ""
    is_frozen = bool(dtypes) or "frozen" in words
    return Part(dtype or ("bfloat16" if is_frozen else ""), not is_frozen, "host" in words)


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
        lora: rank of the adapters that train; 0 without adapters.
        base: format of the frozen weights of layers under adapters: ``bfloat16``, ``int8``, ``nf4``
            or ``nvfp4``. Experts stay in bfloat16: transformers holds them in one tensor, which
            bitsandbytes does not quantize.
        rest: dtype of frozen embeddings, head and norms beside a narrow base.
        parts: rows that differ from what ``lora`` and ``base`` imply.
        adapted: matrices with adapters: ``"all"`` of the layers but experts, or ``"attention"``.
        text, source, limits: its name in sentences, where the fields are from, and what it runs.
        software, softwares: its row of measured speed, and beginnings of the rows that are planned
            as this program.
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
    lora: int = 0
    base: str = "bfloat16"
    rest: str = "bfloat16"
    adapted: str = "all"
    parts: tuple[tuple[str, Part], ...] = ()
    text: str = field(default="", compare=False)
    software: str = field(default="", compare=False)
    softwares: Sequence[str] = field(default=(), compare=False)
    source: str = field(default="", compare=False)
    limits: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        refuse_others("program", self, _VALUES)
        if type(self.lora) is not int or self.lora < 0:
            raise RecipeError(
                f"a program has lora = {self.lora!r}.", "Use a rank from 1 on, or 0 for none."
            )

    def part(self, name: str) -> Part:
        """Return the row of a part of the model."""
        for part, row in self.parts:
            if part == name:
                return row
        if not self.lora:
            return Part()
        if name in ("attention", "mlp"):
            return Part(self.base, False)
        is_outside = name != "experts" and self.base != "bfloat16"
        return Part(self.rest if is_outside else "bfloat16", False)

    def part_of(self, matmul: Matmul) -> Part:
        """Return the row of a matrix. A router is stored like attention."""
        if matmul.is_expert:
            return self.part("experts")
        return self.part(matmul.part if matmul.part in ("mlp", "head") else "attention")

    @property
    def reference(self) -> Part | None:
        """Return the row of a frozen copy of the model; None without one."""
        return dict(self.parts).get("reference")

    @property
    def trains_all(self) -> bool:
        """Tell whether every part of the model trains."""
        if self.lora:
            return False
        return all(row.trains for name, row in self.parts if name != "reference")

    def logit_bytes(self, width: float) -> float:
        """Return the bytes per logit at the peak of the loss.

        ``width`` is that of the matmuls' dtype.

        A compiled loss keeps the logits and their gradient. An eager loss also has float32 logits,
        their log-softmax and its gradient, 12 bytes, while the allocator still reserves the logits.
        """
        width = 4.0 if self.head == "float32" else 2.0 if self.head else width
        return (
            2 * width
            if self.loss == "compiled"
            else (12 + width) / (CHUNKS if self.loss == "chunked" else 1)
        )

    def __str__(self) -> str:
        """Write the program as the answer states it."""
        parts = [f"{self.kernels} kernels, {self.loss} loss, {self.attention} attention"]
        if self.gathered:
            parts.append(
                f"float32 shards gathered in {self.gathered} and reduced in {self.reduced}"
            )
        parts.append(
            "micro-batches summed in "
            f"{'the dtype of the weights' if self.sums == 'weight' else self.sums}"
        )
        if self.release:
            parts.append("each gradient freed after its update")
        if self.offload:
            parts.append("states on the host")
        if self.saved:
            parts.append("inputs of recomputed layers on the host")
        if self.lora:
            parts.append(f"adapters of rank {self.lora} over weights frozen in {self.base}")
        for name, row in self.parts:
            state = "trained" if row.trains else f"frozen in {row.dtype}"
            parts.append(f"{name} {state}{' on the host' if row.host else ''}")
        return f"{self.text}: {', '.join(parts)}"


def adapters_of(a: Architecture, program: Program) -> Iterator[Matmul]:
    """Yield both matrices of each adapter, ``[rank, in_features]`` and ``[out_features, rank]``."""
    for m in a.matmuls if program.lora else ():
        if m.part == "attention" or (program.adapted == "all" and m.part == "mlp"):
            yield replace(
                m, name=f"{m.name}.lora_A", out_features=program.lora, split="none", has_bias=False
            )
            yield replace(
                m, name=f"{m.name}.lora_B", in_features=program.lora, split="none", has_bias=False
            )


CHUNKS = 8
"""Chunks of the tokens in a chunked loss: torchtitan's default."""
_VALUES: dict[str, tuple[Any, ...]] = {
    "kernels": ("eager", "compiled", "fused"), "loss": ("whole", "compiled", "chunked"), "head": ("", "bfloat16", "float32"),
    "selective": ("attention", "operations", "modules"), "attention": ("flash", "eager"), "gathered": ("", "bfloat16"),
    "reduced": ("bfloat16", "float32"), "sums": ("weight", *ACCUMULATION_DTYPES), "release": (False, True),
    "offload": (False, True), "saved": ("", "host"), "base": BASES, "rest": tuple(FROZEN_BITS), "adapted": ("all", "attention"),
}  # fmt: skip
PROGRAMS: dict[str, Program] = {
    name: Program(name, **row) for name, row in load_data("programs", "planner").items()
}
"""Programs by name. The first is the default."""
DEFAULT = PROGRAMS["compiled"]


def program_of(software: set[str]) -> Program:
    """Return the program of a row of measured speed, or the default one."""
    named = (
        row
        for row in PROGRAMS.values()
        if all(name.startswith(tuple(row.softwares)) for name in software)
    )
    return next(named, DEFAULT)


_FIELDS = tuple(
    row.name
    for row in dataclasses.fields(Program)
    if row.compare and row.name not in ("name", "parts")
)


def read_program(text: str | Program) -> Program:
    """Read a program: a name of ``PROGRAMS``, fields with values, or both, between commas."""
    if isinstance(text, Program):
        return text
    name, fields = read_fields(
        text, "program", PROGRAMS, _FIELDS, f"There are {', '.join(PROGRAMS)}."
    )
    switches = {"true": True, "false": False}
    return replace(
        PROGRAMS.get(name, DEFAULT),
        **{key: switches.get(value, value) for key, value in fields.items()},
    )


def with_parts(program: Program, parts: Mapping[str, str]) -> Program:
    """Return a program with rows of its table of parts replaced.

    Args:
        parts: texts of :func:`read_part` by name of a part.
    Raises:
        RecipeError: an unknown part, a reference that trains, or nothing that trains.
    """
    if not parts:
        return program
    rows = dict(program.parts)
    for name, text in parts.items():
        if name not in PARTS:
            raise RecipeError(
                f"Cannot plan a part named {name!r}.",
                suggestion(name, PARTS) or f"There are {', '.join(PARTS)}.",
            )
        rows[name] = read_part(text)
        if name == "reference" and rows[name].trains:
            rows[name] = rows[name]._replace(trains=False, dtype="bfloat16")
    result = replace(program, parts=tuple(rows.items()))
    weights = [name for name in PARTS if name != "reference"]
    if not program.lora and not any(result.part(name).trains for name in weights):
        raise RecipeError("Cannot plan a model of which nothing trains.", "Name --lora.")
    return result
