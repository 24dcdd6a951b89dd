"""Programs: the training loop that a plan describes. Memory and time read the same description.

A named program is a row of ``data/programs.toml`` with its source, and the limits of what it runs. ``compiled`` has no limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import RecipeError
from narrowgauge.planner.layouts import AXES, read_fields, refuse_others
from narrowgauge.planner.model import Architecture, Matmul
from narrowgauge.spec.sums import ACCUMULATION_DTYPES
from narrowgauge.spec.toml import load_data
from narrowgauge.spec.update_rules import UPDATE_RULES

if TYPE_CHECKING:
    from narrowgauge.planner.jobs import Job

BASE_BITS = {"bfloat16": 16.0, "int8": 8.0, "nf4": 4 + 8 / 64 + 32 / (64 * 256), "nvfp4": 4.5}
"""Bits of a frozen weight, scales included. NF4 has 8-bit scales of 64 weights, and float32 scales of 256 of these (QLoRA,
arXiv 2305.14314, section 3)."""


@dataclass(frozen=True, slots=True)
class Program:
    """Describe a training loop.

    Args:
        kernels: of layers: one operation after the other, compiled by layer, or fused by hand (Megatron-Core, Liger).
        loss: over all logits in eager operations, over all logits compiled, or in chunks of the tokens.
        head: dtype of the logits; empty for the matmuls' dtype.
        selective: what a layout with ``recompute = "selective"`` repeats: scores of unfused attention; all but attention
            and every second matmul (torchtitan); or norms, gates and up-projections of latents (DeepSeek-V3).
        attention: a flash kernel, which saves no scores, or matmuls around a softmax.
        gathered: dtype of gathered float32 shards under FSDP; empty for float32 under autocast.
        reduced: dtype of the gradients that FSDP reduces, if ``gathered`` is set.
        sums: dtype of the gradient sum over micro-batches; ``"weight"`` for the parameter's.
        release: each layer's gradient is freed after its update, within backward.
        offload: gradients, optimizer states and their update are on the host.
        lora: rank of the adapters that train; 0 if all weights train.
        base: format of the frozen weights of layers under adapters: ``bfloat16``, ``int8``, ``nf4`` or ``nvfp4``.
        adapted: matrices with adapters: ``"all"`` of the layers but experts, or ``"attention"``.
        text, source, limits: its name in sentences, where the fields are from, and what it runs.
        software, softwares: its row of measured speed, and beginnings of the rows that are planned as this program.
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
    lora: int = 0
    base: str = "bfloat16"
    adapted: str = "all"
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

    @property
    def base_bytes(self) -> float:
        """Return the bytes of a frozen weight."""
        return BASE_BITS[self.base] / 8

    def logit_bytes(self, width: float) -> float:
        """Return the bytes per logit at the peak of the loss. ``width`` is that of the matmuls' dtype.

        A compiled loss keeps the logits and their gradient. An eager loss also has float32 logits, their log-softmax and its
        gradient, 12 bytes, while the allocator still reserves the logits.
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
            f"micro-batches summed in {'the dtype of the weights' if self.sums == 'weight' else self.sums}"
        )
        parts += ["each gradient freed after its update"] * self.release + [
            "states on the host"
        ] * self.offload
        if self.lora:
            parts.append(f"adapters of rank {self.lora} over weights frozen in {self.base}")
        return f"{self.text}: {', '.join(parts)}"

    def why_not(self, job: Job) -> str:
        """Say why this program does not run a job; empty if it does."""
        limits, layout, recipe, a = self.limits, job.layout, job.recipe, job.architecture
        if not limits:
            return ""
        axes, zeros, heads = limits["axes"], limits["zeros"], a.num_kv_heads
        used = [axis for axis in (*AXES, "expert") if getattr(layout, axis) > 1]
        groups, rule = layout.pipeline * layout.interleave, UPDATE_RULES[job.optimizer].optimizer
        # A recipe that the program has itself needs no optimizer and no layers of ours.
        is_own = recipe.storage.short_name in limits.get("storages", ()) and rule in (
            "AdamW",
            "Adam",
        )
        is_own &= recipe.compute.is_wide or recipe.compute.name in limits.get("computes", ())
        is_own &= not recipe.reduction.order_invariant
        is_wide, is_lora = recipe.compute.is_wide or is_own, bool(job.program.lora)
        narrow_axes = axes if is_wide else limits.get("narrow_axes", axes)
        reasons = {
            f"it does not run on {job.chip.vendor}'s chips": job.chip.vendor not in limits.get("vendors", ("NVIDIA", "AMD")),
            f"it has no {', '.join(sorted({*used} - {*axes}))} ranks": not {*used} <= {*axes},
            f"it has no ZeRO-{layout.zero}": layout.zero not in zeros and layout.num_sharing > 1,
            "it has no adapters": is_lora and not limits.get("has_adapters"),
            "it does not offload states": job.program.offload and not limits.get("has_offload"),
            f"it does not run {recipe.name}": not (is_own or is_lora or limits.get("ours", True)),
            f"it does not run {job.optimizer}": rule not in limits.get("rules", (rule,)),
            f"it has no {', '.join(sorted({*used} - {*narrow_axes}))} ranks under narrow layers": not {*used} <= {*narrow_axes},
            f"{layout.tensor} tensor ranks do not divide {heads} key and value heads": (
                limits.get("divides_kv_heads") and heads % layout.tensor
            ),
            f"{groups} groups of layers do not divide {a.num_layers} layers": (
                limits.get("has_even_stages") and all((a.num_layers + extra) % groups for extra in range(4))
            ),
        }  # fmt: skip
        return next((reason for reason, is_so in reasons.items() if is_so), "")


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
    "offload": (False, True), "base": tuple(BASE_BITS), "adapted": ("all", "attention"),
}  # fmt: skip
PROGRAMS: dict[str, Program] = {
    name: Program(name, **row) for name, row in load_data("programs", "planner").items()
}
"""Programs by name. The first is the default."""
DEFAULT = PROGRAMS["compiled"]


def programs_of(job: Job) -> list[Program]:
    """Return the programs that run a job: its own, or all named ones if its own has no limits."""
    programs = (
        [job.program] if job.program.limits else [row for row in PROGRAMS.values() if row.limits]
    )
    return [program for program in programs if not program.why_not(job)]


def program_of(software: set[str]) -> Program:
    """Return the program of a row of measured speed, or the default one."""
    named = (
        row
        for row in PROGRAMS.values()
        if all(name.startswith(tuple(row.softwares)) for name in software)
    )
    return next(named, DEFAULT)


_FIELDS = tuple(
    row.name for row in dataclasses.fields(Program) if row.compare and row.name != "name"
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
