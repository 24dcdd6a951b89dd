"""Plans: try recipes on machines, each in its best layout, and sort them."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from narrowgauge.errors import (
    ChipError,
    DataError,
    NarrowgaugeError,
    RecipeError,
    suggestion_or_all,
)
from narrowgauge.planner.candidates import compared_recipes, keeps_rate, refuse_optimizer
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.layouts import Layout, read_layout
from narrowgauge.planner.machine import Cluster, cluster_of, read_cluster
from narrowgauge.planner.model import read_model
from narrowgauge.planner.nearest import correction_of
from narrowgauge.planner.program import (
    BASES,
    Program,
    adapters,
    program_on,
    read_program,
    with_parts,
)
from narrowgauge.planner.search import (
    LEAST_TOKENS_PER_STEP,
    MOST_CONTEXT,
    search,
    usual_tokens_per_step,
)
from narrowgauge.planner.shapes import Architecture
from narrowgauge.planner.words import Plan
from narrowgauge.spec.chips import Chip, read_chip
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.toml import refuse_unknown
from narrowgauge.spec.update_rules import COUNT, Range

_SEQUENCE_LENGTH = 4096
_SHORTEST = 512
_LONGEST = 1 << 24
_STEP_OF_LENGTH = 128
_RATES = ("interconnect_gbit_per_second", "host_memory_gb", "chips_per_node")
_NUMBERS = {
    "sequence_length": COUNT, "chips": COUNT, "lora": Range(is_integer=True), "tokens_per_step": Range(1), "tokens": Range(1),
    "price": Range(1e-6), "like": Range(1e-3),
}  # fmt: skip
"""The values of a question's numbers."""
EQUAL_RATES = 0.02
"""Rates of rows within this fraction count as equal. The order then follows the risk."""
FINE_MOMENT = 5
"""Mantissa bits of a second moment from which a storage is safe: those of ``word``."""
MOST_CHANGES = 4
_RANK = 16


def plan(
    model: Any,
    *,
    tokens: float | None = None,
    like: float | None = None,
    price: float | None = None,
    advise: bool = True,
    **asked: Any,
) -> Plan:
    """Plan what fits, how fast, in which layout, and why.

    Nothing is trained, and only a ``config.json`` needs transformers.

    Args:
        model: a preset's name, a Hugging Face ``config.json``, its folder or a cached ``org/name``,
            an architecture, or a module. A step of a module is counted on fake tensors, and planned
            over data and shard ranks.
        tokens: of the whole run, for its days.
        like: measured tokens per second of all chips of the answer's first row.
        price: of a chip-hour, for the price of the run.
        advise: whether to look for what would fit.
        asked: the question. ``batch`` and ``loss`` of a module's step on each chip: arguments, and
            ``loss(model, batch)``; None for the output's ``loss`` or its sum. ``recipes``: names,
            files or recipes; ``"all"`` for every recipe that the chips multiply natively.
            ``chip``, ``chips``: names (``narrowgauge show chips``) or files, and numbers, 1 by
            default. ``cluster``: files or values instead. ``sequence_length`` in tokens; None for
            4096, or for fewer positions. ``tokens_per_step``; chosen if None. ``optimizer``: a rule
            of ``narrowgauge show rules`` but ``"sgd"``, or an optimizer. ``layout``: fields with
            fixed values, ``{"tensor": 2}`` or ``"fsdp2,recompute=none"``. ``program``: a name,
            fields with values, or both, as ``"hf-trainer,loss=chunked"``: see
            :class:`~narrowgauge.planner.program.Program`. ``lora``, ``base``: rank of adapters, and
            the format of the frozen weights. ``parts``: rows of the table of parts
            (:data:`~narrowgauge.planner.program.PARTS`). Further fields of
            :class:`~narrowgauge.planner.machine.Cluster` for ``chip``.
    Returns:
        The jobs, the best first.
    Raises:
        NarrowgaugeError: the question contradicts itself, or a model, chip, recipe or cluster is
            unknown.

    Example:
        >>> best = plan("llama-8b", recipes="bfloat16/word", chip="H100-SXM", chips=8).best
        >>> best.fits, best.layout.shard
        (True, 8)
    """
    refuse_numbers({**asked, "tokens": tokens, "price": price, "like": like})
    if price is not None and tokens is None:
        raise NarrowgaugeError("Cannot price a run without its tokens.", "Name tokens (--tokens).")
    question = read_question(model, **asked)
    jobs, left_out = question.answer()
    if like is not None:
        question = replace(question, correction=correction_of(jobs[0], like))
        jobs = question.corrected(jobs)
    changes: list[tuple[str, Estimate]] = []
    if advise and not jobs[0].fits:
        changes = question.instead()
    return Plan(tuple(jobs), question.name, tokens, left_out, price, tuple(changes))


def plan_longest(model: Any, *, like: float | None = None, **asked: Any) -> Plan:
    """Plan the longest sequence that fits, to 128 tokens.

    Arguments are those of :func:`plan` but ``sequence_length``.

    Raises:
        NarrowgaugeError: no length fits, or the question is wrong at every length.

    Example:
        >>> plan_longest("llama-1b", chip="RTX-4090", recipes="bfloat16/word").best.sequence_length > 10_000
        True
    """
    refuse_numbers({**asked, "like": like})
    question = read_question(model, **asked, sequence_length=_STEP_OF_LENGTH)
    positions = question.architecture.positions or _LONGEST

    @cache
    def jobs(length: int) -> tuple[Estimate, ...]:
        return tuple(replace(question, length=length).answer()[0])

    def is_too_long(length: int) -> bool:
        try:
            return length > positions or not jobs(length)[0].fits
        except NarrowgaugeError:  # no step of one sequence
            return True

    jobs(_STEP_OF_LENGTH)  # raises if the question is wrong at every length
    # Context ranks need a multiple of them.
    odd = []
    for where in question.machines:
        part = where.chips // (where.chips & -where.chips)
        if part <= MOST_CONTEXT:
            odd.append(part)
    unit = _STEP_OF_LENGTH * math.lcm(*odd)
    if is_too_long(unit):
        unit = _STEP_OF_LENGTH
    sizes = range(unit, _LONGEST, unit)
    place = bisect_left(sizes, True, key=is_too_long)
    if not place:
        raise NarrowgaugeError(
            f"No sequence fits, even of {unit} tokens.", "Ask narrowgauge plan run what would fit."
        )
    length = sizes[place - 1]
    between = range(length + unit - _STEP_OF_LENGTH, length, -_STEP_OF_LENGTH)
    length = next((size for size in between if not is_too_long(size)), length)
    answer = jobs(length)
    if like is not None:
        question = replace(question, correction=correction_of(answer[0], like))
    return Plan(tuple(question.corrected(answer)), question.name)


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
    lora: int = 0
    base: str = ""
    parts: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_step: float | None = None
    correction: float = 1.0

    def corrected(self, jobs: Iterable[Estimate]) -> list[Estimate]:
        """Return jobs as fast as a measured run."""
        return [replace(job, correction=self.correction) for job in jobs]

    def program_on(self, chip: Chip) -> Program:
        """Return the training loop on a chip, with its table of parts."""
        name = self.program or program_on(chip, has_adapters=self.lora > 0)
        program = read_program(name)
        if self.lora:
            program = with_parts(program, adapters(self.lora, self.base or "bfloat16"))
        elif self.base and not program.has_adapters:
            raise RecipeError(
                f"Cannot store the weights in {self.base} because they train.",
                f"Train adapters over them (--lora 16 --base {self.base}).",
            )
        return with_parts(program, self.parts)

    def search(self, where: Cluster, recipe: Recipe, tokens: float | None) -> Estimate:
        """Return the best layout of a recipe on a machine."""
        program = self.program_on(where.chip)
        ask = Estimate(
            self.architecture, recipe, Layout(), where, self.length, program=program, optimizer=self.optimizer,
            correction=self.correction,
        )  # fmt: skip
        usual = usual_tokens_per_step(max(machine.chips for machine in self.machines), program)
        return search(ask, tokens, self.fixed, _shared_tokens(usual, self.length, self.machines))

    def answer(self) -> tuple[list[Estimate], dict[str, str]]:
        """Return the jobs, the best first, and the rows that cannot be planned with the reason.

        Rows have one number of tokens per step, if it is a usual one.
        """
        jobs: list[Estimate] = []
        left_out: dict[str, str] = {}
        refusal: NarrowgaugeError | None = None
        for where in self.machines:
            program = self.program_on(where.chip)
            for recipe in compared_recipes(self.recipes, where.chip, self.optimizer, program):
                try:
                    jobs.append(self.search(where, recipe, self.tokens_per_step))
                except (ChipError, RecipeError) as error:
                    left_out[f"{recipe.title} on {where.chip.name}"] = error.message
                    refusal = refusal or error
        is_one = len(self.machines) == 1 and self.recipes not in ((), "all", [])
        if refusal and (is_one or not jobs):
            raise refusal
        fitting = [job.tokens_per_step for job in jobs if job.fits]
        if self.tokens_per_step is None and "micro_batches" not in self.fixed and fitting:
            usual = [tokens for tokens in fitting if tokens >= LEAST_TOKENS_PER_STEP]
            least = min(usual or fitting)
            for place, job in enumerate(jobs):
                if job.fits and job.tokens_per_step > least:
                    with contextlib.suppress(RecipeError):  # its ranks compute more at once
                        jobs[place] = self.search(job.cluster, job.recipe, least)
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
        tunes = program.has_adapters
        chunked = replace(program, loss="chunked")
        on_host = replace(chunked, saved="host")
        away = replace(chunked, offload=True)
        narrow = {**self.parts, "experts": "nf4"}
        has_experts = self.architecture.mixture is not None and "experts" not in self.parts
        is_wide = tunes and not program.part("mlp").is_narrow
        free = {name: value for name, value in self.fixed.items() if name == "micro_batch"}
        changes: list[tuple[bool, str, dict[str, Any]]] = [
            (program.loss == "whole", "--program loss=chunked", {"program": chunked}),
            (
                tunes and not program.saved,
                "--program loss=chunked,saved=host",
                {"program": on_host},
            ),
            (is_wide, "--base nf4", {"base": "nf4"}),
            (is_wide, "--base nf4 --program loss=chunked", {"base": "nf4", "program": chunked}),
            (
                tunes and has_experts,
                "--base nf4 --part experts=nf4",
                {"base": "nf4", "parts": narrow},
            ),
        ]
        for recipe in ("bfloat16/word", "bfloat16/states8"):
            is_other = bool(self.recipes) and not tunes
            changes.append((is_other, f"--recipe {recipe}", {"recipes": recipe}))
        changes += [
            (free != self.fixed, "without --layout", {"fixed": free}),
            (
                not (tunes or program.offload),
                "--program offload=true,loss=chunked",
                {"program": away},
            ),
        ]
        length = self.length
        while length > _SHORTEST:
            length //= 2
            is_open = self.tokens_per_step is None
            changes.append((is_open, f"--sequence-length {length}", {"length": length}))
        tuned = {"lora": _RANK, "base": "nf4", "recipes": (), "program": ""}
        changes.append((not tunes, f"--lora {_RANK} --base nf4", tuned))
        for factor in (2, 4, 8, 16):
            larger = tuple(_with_chips(where, factor) for where in self.machines)
            changes.append((True, f"--chips {larger[0].chips}", {"machines": larger}))
        for is_possible, text, fields in changes:
            if is_possible:
                yield text, replace(self, **fields)


def read_question(
    model: Any,
    *,
    batch: Any = None,
    loss: Any = None,
    recipes: Any = (),
    chip: Any = (),
    chips: Any = (),
    cluster: Any = (),
    sequence_length: int | None = None,
    tokens_per_step: float | None = None,
    optimizer: Any = "adamw",
    layout: str | Mapping[str, Any] = "",
    program: str | Program = "",
    lora: int = 0,
    base: str = "",
    parts: Mapping[str, Any] | None = None,
    **rates: Any,
) -> Question:
    """Return the question of :func:`plan`.

    Raises:
        NarrowgaugeError: it contradicts itself, or a name is unknown.
    """
    parts = parts or {}
    fixed = read_layout(layout)
    is_named = isinstance(model, str | Path | Architecture)
    if is_named and batch is not None:
        raise DataError("Cannot plan a batch of a named model.", "Name sequence_length.")
    if not is_named:
        from narrowgauge.planner.own_module import of_module, question_of, refuse_options

        refuse_options(
            sequence_length=sequence_length,
            tokens_per_step=tokens_per_step,
            lora=lora,
            base=base,
            parts=parts or (isinstance(program, Program) and program.parts),
            recompute=fixed.setdefault("recompute", "none") != "none",
        )
        model, sequence_length, num_sequences = of_module(model, batch, loss)
        if "micro_batch" not in fixed and "micro_batches" not in fixed:
            fixed |= {"micro_batch": num_sequences, "micro_batches": 1}
        if not isinstance(optimizer, str):
            optimizer, storage = question_of(optimizer)
            recipes = recipes or f"bfloat16/{storage}"
    architecture = model if isinstance(model, Architecture) else read_model(str(model))
    name = architecture.name if isinstance(model, Architecture) else str(model)
    length = _sequence_length(architecture, sequence_length)
    if tokens_per_step is not None and tokens_per_step < length:
        raise NarrowgaugeError(
            f"Cannot plan a step of {tokens_per_step:,.0f} tokens because a sequence has "
            f"{length:,}.",
            "Use shorter sequences, or more tokens.",
        )
    machines = tuple(_machines(cluster, chip, chips, rates))
    _refuse_parts(architecture, parts, base)
    refuse_optimizer(optimizer)
    question = Question(
        name, architecture, machines, length, recipes, optimizer, fixed, program, lora, base, parts,
        tokens_per_step,
    )  # fmt: skip
    ranks = [row.rank for _, row in question.program_on(machines[0].chip).parts]
    most = max([0, *ranks])
    if most > architecture.hidden_size:
        raise RecipeError(
            f"Cannot plan adapters of rank {most:,} on matrices of {architecture.hidden_size:,} "
            "columns.",
            "Name a smaller rank (--lora 16).",
        )
    return question


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
    return (
        False, not keeps_rate(storage), not job.has_room, rate, risk, -job.tokens_per_second,
        job.memory.total,
    )  # fmt: skip


def _with_chips(where: Cluster, factor: int) -> Cluster:
    chips = where.chips * factor
    size = min(chips, max(where.chips_per_node, where.chip.chips_per_node))
    return replace(where, chips=chips, chips_per_node=size, name=f"{chips} × {where.chip.name}")


def _machines(cluster: Any, chip: Any, chips: Any, rates: Mapping[str, Any]) -> Iterator[Cluster]:
    """Yield the clusters of a question."""
    refuse_unknown(rates, _RATES, "a plan", NarrowgaugeError)
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


def refuse_numbers(asked: Mapping[str, Any]) -> None:
    """Raise for a number of a question below its least, or for a value that is not a number."""
    for name, law in _NUMBERS.items():
        for value in _listed(asked.get(name)):
            law.check(name, value)


def _listed(value: Any) -> list[Any]:
    """Return one value, or several, as a list."""
    if value is None:
        return []
    is_one = isinstance(value, str | float | int | Path | Chip | Cluster)
    return [value] if is_one else list(value)


def _refuse_parts(architecture: Architecture, parts: Mapping[str, str], base: str) -> None:
    """Raise for a format that is none, or a part that the model does not have."""
    if base and base not in BASES:
        raise RecipeError(
            f"Cannot store frozen weights in {base!r}.",
            suggestion_or_all(base, BASES),
        )
    present = {matmul.part for matmul in architecture.matmuls}
    for name in {"experts", "mlp"} & set(parts) - present:
        raise RecipeError(
            f"Cannot store the part {name!r} because {architecture.name} has none.",
            f"Leave {name} out.",
        )


def _shared_tokens(tokens: int, length: int, machines: Sequence[Cluster]) -> int:
    """Return the tokens near ``tokens`` that replicas of every cluster share evenly, in
    micro-batches of several sequences.
    """
    unit = math.lcm(*(where.chips for where in machines))
    sequences = max(1, round(tokens / length))
    for micro_batch in (8, 4, 2, 1):
        if sequences >= 2 * unit * micro_batch:
            return length * unit * micro_batch * round(sequences / unit / micro_batch)
    return length * sequences


def _sequence_length(architecture: Architecture, length: int | None) -> int:
    if length is None:
        longest = architecture.positions
        if architecture.name in MODELS and not longest:
            longest = MODELS[architecture.name].max_positions
        return min(longest or _SEQUENCE_LENGTH, _SEQUENCE_LENGTH)
    # Rotary positions extend beyond the trained positions, learned positions do not.
    if architecture.positions and length > architecture.positions:
        raise NarrowgaugeError(
            f"Cannot plan sequences of {length:,} tokens because {architecture.name} has "
            f"{architecture.positions:,} positions.",
            "Use shorter sequences.",
        )
    return length
