"""Plans: try recipes on machines, each in its best layout, and sort them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import (
    ChipError,
    NarrowgaugeError,
    RecipeError,
    suggestion_or_all,
)
from narrowgauge.planner.candidates import compared_recipes, keeps_rate
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.layouts import Layout, read_layout
from narrowgauge.planner.machine import Cluster, cluster_of, read_cluster
from narrowgauge.planner.model import read_model
from narrowgauge.planner.program import Program, Tuning, program_on, read_program
from narrowgauge.planner.search import search
from narrowgauge.planner.shapes import Architecture
from narrowgauge.planner.words import Plan
from narrowgauge.spec.chips import Chip, read_chip
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.toml import refuse_unknown
from narrowgauge.spec.update_rules import UPDATE_RULES
from narrowgauge.spec.values import require_number

SEQUENCE_LENGTH = 4096
TOKENS_PER_STEP = 1 << 22
"""Default tokens of an optimizer step: four million, as Llama 3 begins with (arXiv 2407.21783,
section 3.4.1), and at least 1,024 a chip.
"""
ADAPTER_TOKENS_PER_STEP = 1 << 16
"""Default tokens of a step of adapters: 32 sequences of 2,048."""
_SHORTEST = 512
_RATES = ("interconnect_gbit_per_second", "host_memory_gb", "chips_per_node")
EQUAL_RATES = 0.02
"""Rates of rows within this fraction count as equal. The order then follows the risk."""
FINE_MOMENT = 5
"""Mantissa bits of a second moment from which a storage is safe: those of ``word``."""
MOST_CHANGES = 4
_RANK = 16


def plan(model: Any, *, tokens: float | None = None, advise: bool = True, **asked: Any) -> Any:
    """Plan what fits, how fast, in which layout, and why.

    Nothing is trained, and only a ``config.json`` needs transformers.

    Args:
        model: a preset's name, a Hugging Face ``config.json``, its folder or a cached ``org/name``,
            an architecture, or a module, of which a step on ``batch`` is counted
            (:func:`~narrowgauge.planner.module.plan_module` has its arguments).
        tokens: of the whole run, for its days.
        advise: whether to look for what would fit.
        asked: the question. ``recipes``: names or recipes; ``"all"`` for every recipe that the
            chips multiply natively. ``chip``, ``chips``: names (``narrowgauge show chips``) or
            files, and numbers, 1 by default. ``cluster``: files or values instead.
            ``sequence_length`` in tokens; None for 4096, or for fewer positions.
            ``tokens_per_step``; four million if None. ``optimizer``: a rule of ``narrowgauge show
            rules``. ``layout``: fields with fixed values, ``{"tensor": 2}`` or
            ``"fsdp2,recompute=none"``. ``program``: a name, fields with values, or both, as
            ``"hf-trainer,loss=chunked"``: see :class:`~narrowgauge.planner.program.Program`.
            ``lora``, ``base``, ``experts``, ``train``: see
            :class:`~narrowgauge.planner.program.Tuning`. Further fields of
            :class:`~narrowgauge.planner.machine.Cluster` for ``chip``.
    Returns:
        A :class:`~narrowgauge.planner.words.Plan`: the jobs, the best first. Of a module a
        :class:`~narrowgauge.planner.module.ModulePlan`.
    Raises:
        NarrowgaugeError: the question contradicts itself, or a model, chip, recipe or cluster is
            unknown.

    Example:
        >>> best = plan("llama-8b", recipes="bfloat16/word", chip="H100-SXM", chips=8).best
        >>> best.fits, best.layout.shard
        (True, 8)
    """
    if not isinstance(model, str | Path | Architecture):
        from narrowgauge.planner.module import plan_module

        return plan_module(model, **asked)
    if tokens is not None:
        require_number("tokens", tokens, 1)
    question = read_question(model, **asked)
    jobs, left_out = question.answer()
    changes: list[tuple[str, Estimate]] = []
    if advise and not jobs[0].fits:
        changes = question.instead()
    return Plan(tuple(jobs), question.name, tokens, left_out, tuple(changes))


@dataclass(frozen=True)
class Question:
    """Hold what is asked: a model on machines, and what is fixed. The rest is searched."""

    name: str
    architecture: Architecture
    machines: tuple[Cluster, ...]
    length: int
    recipes: Any = ()
    optimizer: str = "adamw"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    program: str | Program = ""
    tuning: Tuning = field(default_factory=Tuning)
    tokens_per_step: float | None = None

    def program_on(self, chip: Chip) -> Program:
        """Return the training loop on a chip."""
        return read_program(self.program or program_on(chip, has_adapters=self.tuning.lora > 0))

    @property
    def tokens(self) -> float:
        """Return the tokens of a step of all rows: those of the question, or a usual number that
        the chips of every cluster share evenly.
        """
        if self.tokens_per_step is not None:
            return self.tokens_per_step
        chips = [where.chips for where in self.machines]
        usual = max(TOKENS_PER_STEP, 1024 * max(chips))
        if self.tuning.lora:
            usual = ADAPTER_TOKENS_PER_STEP
        sequences = max(1, round(usual / self.length))
        for micro_batch in (8, 4, 2, 1):
            unit = math.lcm(*chips) * micro_batch
            if sequences >= 2 * unit:
                return self.length * unit * round(sequences / unit)
        return self.length * max(sequences, *chips)

    def search(self, where: Cluster, recipe: Any) -> Estimate:
        """Return the best layout of a recipe on a machine."""
        ask = Estimate(
            self.architecture, recipe, Layout(), where, self.length, self.program_on(where.chip), self.tuning,
            self.optimizer,
        )  # fmt: skip
        return search(ask, self.fixed, self.tokens)

    def answer(self) -> tuple[list[Estimate], dict[str, str]]:
        """Return the jobs, the best first, and the rows that cannot be planned with the reason."""
        jobs: list[Estimate] = []
        left_out: dict[str, str] = {}
        refusal: NarrowgaugeError | None = None
        if self.tokens_per_step is not None and "micro_batches" in self.fixed:
            raise RecipeError(
                f"Cannot take {self.tokens_per_step:,} tokens per step and micro_batches = "
                f"{self.fixed['micro_batches']}: one follows from the other.",
                "Leave one open.",
            )
        for where in self.machines:
            program = self.program_on(where.chip)
            recipes = compared_recipes(
                self.recipes, where.chip, self.optimizer, program, has_adapters=self.tuning.lora > 0
            )
            for recipe in recipes:
                try:
                    jobs.append(self.search(where, recipe))
                except (ChipError, RecipeError) as error:
                    left_out[f"{recipe.name} on {where.chip.name}"] = error.message
                    refusal = refusal or error
        is_one = len(self.machines) == 1 and self.recipes not in ((), "all", [])
        if refusal and (is_one or not jobs):
            raise refusal
        return sorted(jobs, key=_place), left_out

    def instead(self) -> list[tuple[str, Estimate]]:
        """Return up to four changes that make the question fit, the nearest first."""
        changes: list[tuple[str, Estimate]] = []
        for text, changed in self.changes():
            with contextlib.suppress(NarrowgaugeError):
                best = changed.answer()[0][0]
                if best.fits:
                    changes.append((text, best))
            if len(changes) == MOST_CHANGES:
                break
        return changes

    def changes(self) -> Iterator[tuple[str, Question]]:
        """Yield changes by how little they change the training."""
        program = self.program_on(self.machines[0].chip)
        tunes = self.tuning.lora > 0
        chunked = replace(program, loss="chunked")
        nf4 = replace(self.tuning, base="nf4") if tunes else self.tuning
        changes: list[tuple[str, dict[str, Any]]] = []
        if program.loss == "whole":
            changes.append(("--program loss=chunked", {"program": chunked}))
        if tunes and not program.saved:
            on_host = replace(chunked, saved="host")
            changes.append(("--program loss=chunked,saved=host", {"program": on_host}))
        if nf4 != self.tuning:
            changes.append(("--base nf4", {"tuning": nf4}))
            changes.append(
                ("--base nf4 --program loss=chunked", {"tuning": nf4, "program": chunked})
            )
        if tunes and self.architecture.mixture:
            narrow = replace(nf4, experts="nf4")
            changes.append(("--base nf4 --experts nf4", {"tuning": narrow}))
        for recipe in ("bfloat16/word", "bfloat16/states8"):
            if self.recipes and not tunes:
                changes.append((f"--recipe {recipe}", {"recipes": recipe}))
        free = {name: value for name, value in self.fixed.items() if name == "micro_batch"}
        if free != self.fixed:
            changes.append(("without --layout", {"fixed": free}))
        if not program.offload:
            away = replace(chunked, offload=True)
            changes.append(("--program offload=true,loss=chunked", {"program": away}))
        length = self.length
        while length > _SHORTEST and self.tokens_per_step is None:
            length //= 2
            changes.append((f"--sequence-length {length}", {"length": length}))
        if not tunes:
            qlora = {"tuning": Tuning(_RANK, "nf4"), "recipes": (), "program": ""}
            changes.append((f"--lora {_RANK} --base nf4", qlora))
        for factor in (2, 4, 8, 16):
            larger = tuple(_with_chips(where, factor) for where in self.machines)
            changes.append((f"--chips {larger[0].chips}", {"machines": larger}))
        for text, fields in changes:
            yield text, replace(self, **fields)


def read_question(
    model: Any,
    *,
    recipes: Any = (),
    chip: Any = (),
    chips: Any = (),
    cluster: Any = (),
    sequence_length: int | None = None,
    tokens_per_step: float | None = None,
    optimizer: str = "adamw",
    layout: str | Mapping[str, Any] = "",
    program: str | Program = "",
    **rest: Any,
) -> Question:
    """Return the question of :func:`plan`.

    Raises:
        NarrowgaugeError: it contradicts itself, or a name is unknown.
    """
    fixed = read_layout(layout)
    if "batch" in rest:
        raise RecipeError("Cannot plan a batch of a named model.", "Name sequence_length.")
    tuned = {key: rest.pop(key) for key in ("lora", "base", "experts", "train") if key in rest}
    refuse_unknown(rest, _RATES, "a plan", NarrowgaugeError)
    if tokens_per_step is not None:
        require_number("tokens_per_step", tokens_per_step, 1)
    architecture = model if isinstance(model, Architecture) else read_model(str(model))
    if optimizer not in UPDATE_RULES:
        raise RecipeError(
            f"no update rule is named {optimizer!r}.", suggestion_or_all(optimizer, UPDATE_RULES)
        )
    tuning = Tuning(**tuned)
    if tuning.lora > architecture.hidden_size:
        raise RecipeError(
            f"Cannot plan adapters of rank {tuning.lora:,} on matrices of "
            f"{architecture.hidden_size:,} columns.",
            "Name a smaller rank (--lora 16).",
        )
    if tuning.experts != "bfloat16" and architecture.mixture is None:
        raise RecipeError(
            f"Cannot store experts in {tuning.experts} because {architecture.name} has none.",
            "Leave experts out.",
        )
    length = _sequence_length(architecture, sequence_length)
    if tokens_per_step is not None and tokens_per_step < length:
        raise RecipeError(
            f"Cannot plan a step of {tokens_per_step:,} tokens because a sequence has {length:,}.",
            "Name as many tokens, or shorter sequences.",
        )
    return Question(
        architecture.name if isinstance(model, Architecture) else str(model), architecture,
        tuple(_machines(cluster, chip, chips, rest)), length, recipes,
        optimizer, fixed, program, tuning, tokens_per_step,
    )  # fmt: skip


def _place(job: Estimate) -> tuple[Any, ...]:
    """Sort jobs by safety, then speed. Jobs that do not fit come last, the closest first.

    Recipes that do not train at the rate come last, however fast. Jobs that may run out of memory
    come after roomy ones. Among rows of equal speed, moments of few bits are the larger risk.
    """
    if not job.fits:
        return True, -job.headroom_bytes
    storage = job.recipe.storage
    rate = -round(math.log(job.tokens_per_second) / EQUAL_RATES)
    risk = storage.exp_avg_sq.mantissa_bits < FINE_MOMENT
    return False, not keeps_rate(storage), not job.has_room, rate, risk, job.peak_bytes


def _with_chips(where: Cluster, factor: int) -> Cluster:
    chips = where.chips * factor
    size = min(chips, max(where.chips_per_node, where.chip.chips_per_node))
    return replace(where, chips=chips, chips_per_node=size, name=f"{chips} × {where.chip.name}")


def _machines(cluster: Any, chip: Any, chips: Any, rates: Mapping[str, Any]) -> Iterator[Cluster]:
    """Yield the clusters of a question."""
    clusters = _listed(cluster)
    kinds = _listed(chip)
    counts = _listed(chips)
    if bool(clusters) == bool(kinds) or (clusters and (counts or rates)):
        why = "no machine was named"
        if clusters:
            why = f"a cluster has its own {next(iter(rates), 'chips')}"
        advice = "Name chips (--chip H100-SXM --chips 8), or clusters, which have their chips and rates (--cluster FILE)."
        raise ChipError(f"Cannot plan because {why}.", advice)
    for where in clusters:
        yield where if isinstance(where, Cluster) else read_cluster(where)
    for kind in kinds:
        for count in counts or [1]:
            yield cluster_of(kind if isinstance(kind, Chip) else read_chip(kind), count, **rates)


def _listed(value: Any) -> list[Any]:
    """Return one value, or several, as a list."""
    is_one = isinstance(value, str | float | int | Path | Chip | Cluster)
    return [value] if is_one else list(value)


def _sequence_length(architecture: Architecture, length: int | None) -> int:
    if length is None:
        longest = architecture.positions
        if architecture.name in MODELS and not longest:
            longest = MODELS[architecture.name].max_positions
        return min(longest or SEQUENCE_LENGTH, SEQUENCE_LENGTH)
    require_number("sequence_length", length, 1, is_whole=True)
    # Rotary positions extend beyond the trained positions, learned positions do not.
    if architecture.positions and length > architecture.positions:
        raise NarrowgaugeError(
            f"Cannot plan sequences of {length:,} tokens because {architecture.name} has "
            f"{architecture.positions:,} positions.",
            "Use shorter sequences.",
        )
    return length
