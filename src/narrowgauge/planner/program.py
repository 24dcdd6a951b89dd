"""Programs: the training loop that a plan describes. Memory and time read the same description.

A named program is a row of ``data/programs.toml`` with its source, and the limits of what it runs. ``compiled`` has no limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.planner.model import Architecture, Matmul
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.sums import ACCUMULATION_DTYPES
from narrowgauge.spec.toml import load_data
from narrowgauge.spec.update_rules import UPDATE_RULES

if TYPE_CHECKING:
    from narrowgauge.planner.jobs import Job

Kernels = Literal["eager", "compiled", "fused"]
Loss = Literal["whole", "compiled", "chunked"]
Selective = Literal["attention", "operations", "modules"]
Attention = Literal["flash", "eager"]
BASE_BITS = {"bfloat16": 16.0, "int8": 8.0, "nf4": 4 + 8 / 64 + 32 / (64 * 256), "nvfp4": 4.5}
"""Bits of a frozen weight, scales included. NF4 has 8-bit scales of 64 weights, and float32 scales of 256 of these (QLoRA,
arXiv 2305.14314, section 3)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Describe what a program runs.

    Args:
        axes: of the layout that may exceed one rank.
        zeros: ZeRO stages, if ranks shard the state.
        narrow_axes: axes under narrow layers of this project; None for all.
        ours: it steps an optimizer of this project. Otherwise it runs its own ``computes`` and ``storages`` only.
        computes, storages: narrow computes and storages that the program has itself.
        rules: optimizers that it runs; empty for all.
        divides_kv_heads: tensor ranks must divide the key and value heads.
        has_even_stages: stages must have equally many layers, embedding and head counted or not.
        vendor: of the chips; empty for NVIDIA and AMD.
    """

    axes: tuple[str, ...]
    zeros: tuple[int, ...]
    narrow_axes: tuple[str, ...] | None = None
    ours: bool = True
    computes: tuple[str, ...] = ()
    storages: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    divides_kv_heads: bool = False
    has_even_stages: bool = False
    has_adapters: bool = False
    has_offload: bool = False
    vendor: str = ""


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
        offload: optimizer states and their update are on the host.
        lora: rank of the adapters that train; 0 if all weights train.
        base: format of the frozen weights of layers under adapters: ``bfloat16``, ``int8``, ``nf4`` or ``nvfp4``.
        adapted: matrices with adapters: ``"all"`` of the layers but experts, or ``"attention"``.
        text, software, source, limits: its name in sentences, its row of measured speed, where the fields are from, and
            what it runs.
    """

    name: str
    kernels: Kernels = "compiled"
    loss: Loss = "compiled"
    head: str = ""
    selective: Selective = "attention"
    attention: Attention = "flash"
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
    source: str = field(default="", compare=False)
    limits: Limits | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, values in _VALUES.items():
            if (value := getattr(self, name)) not in values:
                advice = suggestion(str(value), tuple(map(str, values)))
                choices = ", ".join(str(value) or "the default" for value in values)
                raise RecipeError(f"a program has {name} = {value!r}.", advice or f"It is one of {choices}.")
        if type(self.lora) is not int or self.lora < 0:
            raise RecipeError(
                f"a program has lora = {self.lora!r}.", "Use a rank from 1 on, or 0 to train all weights."
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
        return 2 * width if self.loss == "compiled" else (12 + width) / (CHUNKS if self.loss == "chunked" else 1)

    def __str__(self) -> str:
        """Write the program as the answer states it."""
        parts = [f"{self.kernels} kernels, {self.loss} loss, {self.attention} attention"]
        if self.gathered:
            parts.append(f"float32 shards gathered in {self.gathered} and reduced in {self.reduced}")
        parts.append(f"micro-batches summed in {'the dtype of the weights' if self.sums == 'weight' else self.sums}")
        parts += ["each gradient freed after its update"] * self.release + ["states on the host"] * self.offload
        if self.lora:
            parts.append(f"adapters of rank {self.lora} over weights frozen in {self.base}")
        return f"{self.text}: {', '.join(parts)}"

    def why_not(self, job: Job) -> str:
        """Say why this program does not run a job; empty if it does."""
        limits, layout, recipe = self.limits, job.layout, job.recipe
        if limits is None:
            return ""
        used = [axis for axis in _AXES if getattr(layout, axis) > 1]
        if job.chip.vendor not in ((limits.vendor,) if limits.vendor else ("NVIDIA", "AMD")):
            return f"it does not run on {job.chip.vendor}'s chips"
        if missing := [axis for axis in used if axis not in limits.axes]:
            return f"it has no {missing[0]} ranks"
        if layout.zero not in limits.zeros and layout.num_sharing > 1:
            return f"it has no ZeRO-{layout.zero}"
        if job.program.lora and not limits.has_adapters:
            return "it has no adapters"
        if job.program.offload and not limits.has_offload:
            return "it does not offload states"
        is_own = _is_own(limits, recipe) and job.optimizer in ("adamw", "adam")
        if not is_own and not limits.ours and not job.program.lora:
            return f"it does not run {recipe.name}"
        if limits.rules and UPDATE_RULES[job.optimizer].optimizer not in limits.rules:
            return f"it does not run {job.optimizer}"
        is_wide = recipe.compute.is_wide or is_own
        if not is_wide and (blocked := [axis for axis in used if axis not in (limits.narrow_axes or limits.axes)]):
            return f"it has no {blocked[0]} ranks under narrow layers"
        if limits.divides_kv_heads and job.architecture.num_kv_heads % layout.tensor:
            return f"{layout.tensor} tensor ranks do not divide {job.architecture.num_kv_heads} key and value heads"
        groups, layers = layout.pipeline * layout.interleave, job.architecture.num_layers
        if limits.has_even_stages and layers % groups and (layers + 2) % groups:
            return f"{groups} groups of layers do not divide {layers} layers"
        return ""


def _is_own(limits: Limits, recipe: Recipe) -> bool:
    """Tell whether a program has a recipe itself, without this project's optimizer and layers."""
    is_known = recipe.compute.is_wide or recipe.compute.name in limits.computes
    return is_known and recipe.storage.short_name in limits.storages and not recipe.reduction.order_invariant


def adapters_of(a: Architecture, program: Program) -> Iterator[Matmul]:
    """Yield both matrices of each adapter, ``[rank, in_features]`` and ``[out_features, rank]``."""
    for m in a.matmuls if program.lora else ():
        if m.part == "attention" or (program.adapted == "all" and m.part == "mlp"):
            yield replace(m, name=f"{m.name}.lora_A", out_features=program.lora, split="none", has_bias=False)
            yield replace(m, name=f"{m.name}.lora_B", in_features=program.lora, split="none", has_bias=False)


CHUNKS = 8
"""Chunks of the tokens in a chunked loss: torchtitan's default."""
_AXES = ("data", "shard", "tensor", "pipeline", "context", "expert")
_VALUES: dict[str, tuple[Any, ...]] = {
    "kernels": get_args(Kernels), "loss": get_args(Loss), "selective": get_args(Selective),
    "attention": get_args(Attention), "head": ("", "bfloat16", "float32"), "gathered": ("", "bfloat16"),
    "reduced": ("bfloat16", "float32"), "sums": ("weight", *ACCUMULATION_DTYPES), "release": (False, True),
    "offload": (False, True), "base": tuple(BASE_BITS), "adapted": ("all", "attention"),
}  # fmt: skip


def _of_row(name: str, row: Mapping[str, Any]) -> Program:
    limits = {key: tuple(value) if isinstance(value, list) else value for key, value in row.get("limits", {}).items()}
    return Program(name, **{**row, "limits": Limits(**limits) if limits else None})


PROGRAMS: dict[str, Program] = {name: _of_row(name, row) for name, row in load_data("programs", "planner").items()}
"""Programs by name. The first is the default."""
DEFAULT = PROGRAMS["compiled"]


def programs_of(job: Job) -> list[Program]:
    """Return the programs that run a job: its own, or all named ones if its own has no limits."""
    programs = [job.program] if job.program.limits else [row for row in PROGRAMS.values() if row.limits]
    return [program for program in programs if not program.why_not(job)]


_FIELDS = tuple(row.name for row in dataclasses.fields(Program) if row.compare and row.name != "name")


def read_program(text: str | Program) -> Program:
    """Read a program: a name of ``PROGRAMS``, fields with values, or both, between commas.

    Example:
        >>> program = read_program("hf-trainer,loss=chunked,lora=16,base=nf4")
        >>> program.kernels, program.loss, program.lora
        ('eager', 'chunked', 16)
    """
    if isinstance(text, Program):
        return text
    program, fields = DEFAULT, dict[str, Any]()
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (side.strip() for side in part.partition("="))
        choices = _FIELDS if equals else tuple(PROGRAMS)
        if name not in choices:
            what = "no field" if equals else "no name"
            raise RecipeError(
                f"a program has {what} '{name}'.", suggestion(name, choices) or f"Known: {', '.join(choices)}."
            )
        if equals:
            switches = {"true": True, "yes": True, "false": False, "no": False}
            fields[name] = int(value) if value.isdecimal() else switches.get(value.lower(), value)
        else:
            program = PROGRAMS[name]
    return replace(program, **fields)
