"""Plans: try recipes on machines, each in its best layout, and sort them."""

import contextlib
import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

from narrowgauge.errors import ChipError, NarrowgaugeError, RecipeError
from narrowgauge.planner.cluster import Cluster, chip_of
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.job import FOREIGN_RULES
from narrowgauge.planner.layouts import Layout, read_layout
from narrowgauge.planner.model import read_model
from narrowgauge.planner.plan_result import Plan
from narrowgauge.planner.program import Program, Tuning, read_program
from narrowgauge.planner.search import Fixed, search
from narrowgauge.planner.shapes import Architecture
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.matmul_kernels import multiplies
from narrowgauge.spec.parse import parse, parse_names
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.require import require_choice, require_number
from narrowgauge.spec.toml import load_data, refuse_unknown
from narrowgauge.spec.update_rules import UPDATE_RULES, refuse_pair

SEQUENCE_LENGTH = 4096
TOKENS_PER_STEP = 1 << 22
"""Default tokens of an optimizer step: four million, as Llama 3 begins with (arXiv 2407.21783,
section 3.4.1), and at least 1,024 a chip.
"""
ADAPTER_TOKENS_PER_STEP = 1 << 16
"""Default tokens of a step of adapters: 32 sequences of 2,048."""
DEFAULT_RECIPES = ("bfloat16/word", "bfloat16/compact", "bfloat16/states8", "bfloat16/master", "float8-row/word",
                   "float16/split", "float16/master")  # fmt: skip
"""Recipes that are compared by default, of those that chip and program run."""
FOREIGN_RECIPES = ("bfloat16/naive", "bfloat16/master")
"""Recipes that are compared for a rule of another program."""
EQUAL_RATES = 0.02
"""Rates of rows within this fraction count as equal. The order of the recipes then stays."""
MOST_CHANGES = 4
_CHANGES = load_data("changes", "planner")["changes"]


def plan(model: Any, *, tokens: float | None = None, advise: bool = True, **asked: Any) -> Plan:
    """Plan what fits, how fast, in which layout, and why.

    Nothing is trained, and only a ``config.json`` needs transformers.

    Args:
        model: a preset's name, a Hugging Face ``config.json``, its folder or its values, or a
            model that transformers built.
        tokens: of the whole run, for its days.
        advise: whether to look for what would fit.
        asked: the question, as of :func:`answers`.
    Returns:
        The jobs, the best first.
    Raises:
        NarrowgaugeError: the question contradicts itself, or a model, chip or recipe is
            unknown.

    Example:
        >>> best = plan("llama-8b", recipes="bfloat16/word", chip="H100-SXM", chips=8).best
        >>> best.fits, best.layout.shard
        (True, 8)
    """
    if tokens is not None:
        require_number("tokens", tokens, 1)
    a = read_model(model)
    jobs, left_out = answers(a, **asked)
    instead: tuple[tuple[str, Estimate], ...] = ()
    if advise and not jobs[0].fits:
        instead = tuple(islice(_changes(a, jobs[0], asked), MOST_CHANGES))
    return Plan(tuple(jobs), tokens, left_out, instead)


def answers(
    a: Architecture,
    *,
    recipes: Any = (),
    chip: Any = "",
    chips: int = 1,
    sequence_length: int | None = None,
    tokens_per_step: float | None = None,
    optimizer: str = "adamw",
    layout: str | Fixed = "",
    program: str | Program = "",
    **tuned: Any,
) -> tuple[list[Estimate], dict[str, str]]:
    """Return the jobs, the best first, and the rows that cannot be planned with the reason.

    Args:
        recipes: names or recipes; the usual ones if none is named.
        chip, chips: a name (``narrowgauge show chips``), a file or a row, and a number.
        sequence_length: in tokens; None for 4096, or for fewer positions.
        tokens_per_step: of all chips; None for four million.
        optimizer: a rule of ``narrowgauge show rules``.
        layout: fields with fixed values, ``{"tensor": 2}`` or ``"tensor=2,recompute=none"``.
        program: a name, fields with values, or both, as ``"hf-trainer,loss=chunked"``: see
            :class:`~narrowgauge.planner.program.Program`.
        tuned: fields of :class:`~narrowgauge.planner.program.Tuning`.
    """
    field_names = [*(answers.__kwdefaults__ or ()), *Tuning.__slots__]
    refuse_unknown(tuned, field_names, "a plan", NarrowgaugeError)
    tuning = Tuning(**tuned)
    require_choice("optimizer", optimizer, (*UPDATE_RULES, *FOREIGN_RULES))
    require_number("lora", tuning.lora, 0, a.hidden_size + 1)
    if tuning.experts != "bfloat16" and not a.num_experts:
        raise RecipeError(f"Cannot store experts: {a.name} has none.", "Leave experts out.")
    length = min(a.positions or SEQUENCE_LENGTH, SEQUENCE_LENGTH)
    if sequence_length is not None:
        length = sequence_length
        require_number("sequence_length", length, 1, is_whole=True)
    # Rotary positions extend beyond the trained positions, learned positions do not.
    if 0 < a.positions < length:
        raise NarrowgaugeError(
            f"Cannot plan sequences of {length:,} tokens because {a.name} has {a.positions:,} positions.",
            "Use shorter sequences.",
        )
    fixed = read_layout(layout)
    if not chip:
        raise ChipError(
            "Cannot plan because no machine was named.",
            "Name chip=H100-SXM chips=8 (flags: --chip, --chips).",
        )
    where = Cluster(chip_of(chip), chips)
    if tokens_per_step is None:
        tokens_per_step = _usual_tokens(length, chips, tuning)
    require_number("tokens_per_step", tokens_per_step, length)
    usual = "hf-trainer" if tuning.lora else "compiled"
    loop = read_program(program or ("maxtext" if where.chip.vendor == "Google" else usual))
    jobs = []
    left_out = {}
    refusal = NarrowgaugeError("")
    for recipe in _recipes(recipes, where.chip, loop, tuning, optimizer):
        try:
            _refuse(recipe, where.chip, optimizer)
            job = Estimate(a, recipe, Layout(), where, length, loop, tuning, optimizer)
            jobs.append(search(job, fixed, tokens_per_step))
        except NarrowgaugeError as error:
            refusal = error
            left_out[recipe.name] = str(error)
    if not jobs:
        raise refusal
    return sorted(jobs, key=_place), left_out


def _usual_tokens(length: int, chips: int, tuning: Tuning) -> int:
    """Return a usual number of tokens of a step, which the chips share evenly."""
    usual = ADAPTER_TOKENS_PER_STEP if tuning.lora else max(TOKENS_PER_STEP, 1024 * chips)
    unit = chips * length
    for _ in range(3):  # in micro-batches of up to eight
        if usual >= 4 * unit:
            unit *= 2
    return unit * max(1, round(usual / unit))


def _recipes(
    asked: Any, chip: Chip, program: Program, tuning: Tuning, optimizer: str
) -> list[Recipe]:
    """Return the recipes of a question on a chip: those that it names, or usual ones."""
    if asked and isinstance(asked, str):
        return parse_names(asked)
    if asked:
        return list(map(parse, asked if isinstance(asked, list | tuple) else [asked]))
    if optimizer in FOREIGN_RULES:
        return list(map(parse, FOREIGN_RECIPES))
    suited = []
    for recipe in map(parse, DEFAULT_RECIPES):
        is_short = recipe.dtype == "float16" and "bfloat16" in chip.peak_tflops
        is_foreign = recipe.storage.short_name != "master" and not program.ours
        is_tuned = tuning.lora and not recipe.compute.is_wide
        if multiplies(recipe.compute, chip) and not (is_short or is_tuned or is_foreign):
            suited.append(recipe)
    return suited or [parse("bfloat16/master")]


def _refuse(recipe: Recipe, chip: Chip, optimizer: str) -> None:
    """Raise for a recipe that the chip does not multiply, or whose storage the rule cannot step."""
    if chip.rate_format(recipe.dtype) not in chip.peak_tflops:
        raise ChipError(
            f"Cannot run {recipe.name}: {chip.name} does not multiply {recipe.dtype}.",
            "Name another.",
        )
    rule = UPDATE_RULES.get(optimizer)
    if rule is not None:
        row = recipe.storage.with_states(rule.moments.items())
        refuse_pair(optimizer, row, is_matrix=rule.is_matrix, is_adamw=optimizer == "adamw")


def _place(job: Estimate) -> tuple[Any, ...]:
    """Sort jobs by safety, then speed. Jobs that do not fit come last, the closest first.

    Recipes that do not train at the rate come last, however fast. Jobs that may run out of memory
    come after roomy ones.
    """
    if not job.fits:
        return True, -job.headroom_bytes
    rate = -round(math.log(job.tokens_per_second) / EQUAL_RATES)
    return False, not job.recipe.storage.keeps_updates, not job.has_room, rate


def _changes(a: Architecture, job: Estimate, asked: Fixed) -> Iterator[tuple[str, Estimate]]:
    """Yield changes of a question that fit, by how little they change the training: flags and job."""
    loop = asked.get("program") or job.program
    if isinstance(loop, Program):
        loop = loop.name
    numbers = {"sequence_length": job.sequence_length, "chips": job.cluster.chips}
    for row in _CHANGES:
        change = {**row}
        if change.get("program"):
            change["program"] = f"{loop},{change['program']}"
        for name in numbers.keys() & change.keys():
            change[name] = int(numbers[name] * change[name])
        with contextlib.suppress(NarrowgaugeError):
            best = answers(a, **{**asked, **change})[0][0]
            if best.fits:
                named = {name.replace("_", "-"): value for name, value in change.items() if value}
                flags = " ".join(f"--{name} {value}" for name, value in named.items())
                yield flags or "without --layout", best
