"""Why two runs differ: one table of reasons, and which of them the place of the first difference allows.

Every reason acts at certain stages of a step. A seed acts on the first weights; another order of a sum cannot show before a
matmul has summed; the limit of the gradient norm cannot show before the update. So the stage of the first difference rules out
most reasons, whatever else differs between the runs; the settings that differ rule out most of the rest; and the size of that
difference distinguishes rounding, which is as small as the format says, from anything else. What none of the settings explains
is a bug, other code, or a fault of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from narrowgauge.analysis.diagnosis.pairs.alignment import Alignment, SettingDifference
from narrowgauge.analysis.diagnosis.pairs.first_difference import FirstDifference

_MODEL = tuple(
    f"model.{name}"
    for name in (
        "class", "num_parameters", "hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size", "mlp",
    )
)  # fmt: skip
_FORWARD = ("output", "loss", "grad", "norm")


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason why two runs differ.

    Args:
        title: what it is, to follow "Cause: ".
        decided_by: the settings that decide it, as ``table.name`` or ``table.*`` of ``run.toml``; empty where none does.
        stages: where the first difference may be.
        size: how large the first difference is: that of ``rounding``, ``above`` it, or ``any``.
        weight: how likely it is, relative to the other reasons that the place allows.
        of_one_rank: it makes one rank alone differ from the other run, or from the other ranks.
    """

    name: str
    title: str
    decided_by: tuple[str, ...]
    stages: tuple[str, ...]
    size: str
    weight: float
    remedy: str
    of_one_rank: bool = False


_ROWS = (
    Reason(
        "other-model", "another model", ("config.model", *_MODEL), ("start", *_FORWARD, "update", "evaluation"), "any", 1.0,
        "Compare runs of one model.",
    ),
    Reason(
        "random-numbers",
        "other random numbers: the seed decides the first weights, the order of the data and stochastic rounding",
        ("config.seed",), ("start", "tokens", "output", "loss", "update"), "any", 1.0,
        "Give both runs one {seed}.",
    ),
    Reason(
        "data", "other data, or batches of another shape",
        ("config.data", "config.tokenizer", "config.held_out", "config.batch_size", "config.sequence_length", "data.*"),
        ("tokens", "loss", "output"), "any", 1.0,
        "Give both runs {same_data}; the order follows from the seed.",
    ),
    Reason(
        "data-order", "the same data in another order, which no setting says", (), ("tokens",), "any", 1.0,
        "Look at what reads the data: a resume from another batch, skipped batches (on_spike), a rank that reads another's.",
    ),
    Reason(
        "format", "another number format or cast",
        ("config.recipe", "config.accumulation_dtype", "model.dtypes", "model.formats"),
        ("start", *_FORWARD, "skip", "update"), "any", 1.0,
        "Expected of two recipes; narrowgauge compare says what each costs.",
    ),
    Reason(
        "reduction", "another reduction of the gradients", ("config.recipe.reduction",),
        ("grad", "norm", "loss", "update"), "any", 1.0,
        "Expected of two reductions; narrowgauge show reductions says which one does not depend on the order.",
    ),
    Reason(
        "optimizer-settings", "other settings of the optimizer",
        (
            "config.rule", "config.rule_options", "config.lr", "config.schedule", "config.warmup_steps", "config.min_lr_ratio",
            "config.steps", "config.beta1", "config.beta2", "config.eps", "config.weight_decay",
            "config.max_grad_norm", "config.on_spike", "optimizer.*",
        ),
        ("rate", "skip", "clip", "update", "loss"), "any", 1.0,
        "Give both runs the same settings.",
    ),
    Reason(
        "order-of-sums", "another order of the same sums",
        (
            "config.gradient_accumulation_steps", "config.shard", "config.replicas", "config.offload", "config.threads",
            "machine.ranks", "machine.num_threads", "arithmetic.sums.*",
        ),
        (*_FORWARD, "update", "evaluation"), "rounding", 1.0,
        "Only rounding differs. For equal bits use an order-free reduction (…/reproducible), and the same number of threads.",
    ),
    Reason(
        "kernels", "other kernels or versions of a library",
        ("config.compile", "config.activation_checkpointing", "config.narrow_gather", "versions.*", "arithmetic.versions.*"),
        ("start", *_FORWARD, "update", "evaluation"), "rounding", 0.8,
        "Install the same versions; a compiled and an eager model round differently.",
    ),
    Reason(
        "hardware", "another machine",
        ("machine.device", "machine.capability", "machine.processor", "machine.system", "arithmetic.machine.*"),
        ("start", *_FORWARD, "update", "evaluation"), "rounding", 0.7,
        "Only rounding differs. narrowgauge show arithmetic RUN OTHER names the operations.",
    ),
    Reason(
        "nondeterminism", "sums whose order varies from run to run", (), (*_FORWARD, "update"), "rounding", 0.3,
        "Repeat one of the runs. If it differs from itself, look for atomic additions (torch.use_deterministic_algorithms) and "
        "for a reduction whose order depends on timing.",
    ),
    Reason(
        "bug", "other code: a bug in one of the two, or a change that no setting records",
        (), ("output", "loss", "grad", "norm", "rate", "skip", "clip", "update"), "above", 0.3,
        "Look at the code that makes this tensor, and whether a seed fixes every random number; run both with one installation.",
    ),
    Reason(
        "written-between-steps", "code outside of the optimizer, which changes weights or states between two steps",
        (), ("held",), "above", 0.3,
        "Look at what one of the two does after the optimizer's step and before the next: averages, clipping or scaling of "
        "weights, loading.",
    ),
    Reason(
        "one-rank", "one rank does not do what the others do", (), ("output", "grad", "skip", "clip", "update"), "above", 1.0,
        "Look at what this rank alone does to its gradients: clipping, hooks, a reduction that it leaves out.",
        of_one_rank=True,
    ),
    Reason(
        "silent-corruption", "damaged memory or arithmetic",
        (), ("held", "output", "loss", "grad", "norm", "update"), "any", 0.03,
        "Repeat the run that is off from its last checkpoint: damage does not happen twice. Then test the machine.",
    ),
    Reason(
        "missing-part", "one run has a tensor that the other lacks, and no setting says so", (),
        ("start", "output", "grad", "update"), "any", 0.3,
        "Look at why this tensor is there in one run alone: a frozen parameter, a part that is left out or never used, another "
        "version of the model's code.",
    ),
    Reason(
        "evaluation-settings", "other settings of the evaluation",
        ("config.eval_batches", "config.held_out", "config.data", "data.*"), ("evaluation",), "any", 1.0,
        "Give both runs the same evaluation.",
    ),
    Reason(
        "evaluation", "another evaluation of the same training: its mode, weights, data or code", (),
        ("evaluation",), "above", 1.0,
        "Look at what evaluates: model.eval(), averaged or stale weights, which tokens are held out, and how they are shifted.",
    ),
    Reason(
        "other-start", "the runs began from other weights", (), ("start",), "any", 0.5,
        "Begin both from one checkpoint.",
    ),
)  # fmt: skip

REASONS: dict[str, Reason] = {row.name: row for row in _ROWS}


def without_rounding(alignment: Alignment) -> Alignment:
    """The alignment at the first difference beyond rounding, where rounding is all that explains the very first one."""
    first = alignment.first_difference
    if (
        first is None
        or alignment.beyond_rounding is None
        or any(
            row.size == "any" and first.stage in row.stages and deciding(row, alignment.differences)
            for row in REASONS.values()
        )
    ):
        return replace(alignment, beyond_rounding=None)
    return replace(alignment, first_difference=alignment.beyond_rounding, beyond_rounding=None, rounded=first)


def weigh(alignment: Alignment) -> dict[str, float]:
    """How likely each reason is, given the first difference: the likeliest first; empty where the runs do not differ."""
    difference = alignment.first_difference
    if difference is None:
        return {}
    small = alignment.is_rounding(difference)
    weights = {row.name: _weight(row, alignment, difference, small) for row in REASONS.values()}
    if any(weights[row.name] > 0 and _explains(row, alignment, small) for row in REASONS.values()):
        # A setting that differs and acts there explains it; that something else happened there as well is unlikely.
        weights = {
            name: value * (1.0 if deciding(REASONS[name], alignment.differences) else 0.05)
            for name, value in weights.items()
        }
    total = sum(weights.values())
    ranked = sorted(weights.items(), key=lambda item: -item[1])
    return {name: value / total for name, value in ranked if value > 0} if total else {}


def _fits(row: Reason, small: bool | None) -> bool:
    return small is None or row.size == "any" or small == (row.size == "rounding")


def _explains(row: Reason, alignment: Alignment, small: bool | None) -> bool:
    """Whether a setting that differs decides a reason that fits the size of the difference."""
    return _fits(row, small) and bool(deciding(row, alignment.differences)) and _of_replays(row, alignment) == 1.0


_CODE = ("bug", "written-between-steps")
"""Reasons that are other code, whatever the settings say."""
_MISFIT = {"rounding": 0.005, "above": 0.05}
"""How much less likely a reason is where the size does not fit: rounding is never large, but wrong code may err by little."""
_STEPS_IN_DOUBT = 2
"""Steps with equal bits after which an order of sums that varies is half as likely: it acts in every step."""


def _weight(row: Reason, alignment: Alignment, difference: FirstDifference, small: bool | None) -> float:
    if difference.stage not in row.stages or (row.decided_by and not deciding(row, alignment.differences)):
        return 0.0
    weight = row.weight if _fits(row, small) or _parts_again(row, alignment) else _MISFIT[row.size] * row.weight
    if alignment.is_exact and row.name in ("order-of-sums", "nondeterminism"):
        return 0.0  # no sum came between equal values and the update
    if row.name == "missing-part" and difference.only_in is None:
        return 0.0
    is_of_one_run = difference.only_in is not None and difference.stage != "held"
    if is_of_one_run and row.name not in ("missing-part", "other-model"):
        weight *= _EXCLUDED
    if row.size == "rounding":
        weight /= 1 + max(0, difference.step - 1) / _STEPS_IN_DOUBT
    return weight * _of_rank(row, difference) * _of_tensor(row, difference, alignment) * _of_replays(row, alignment)


def _parts_again(row: Reason, alignment: Alignment) -> bool:
    """Whether replays show other code however small the difference: one run has the bits of its replay, the other never has."""
    replayed = alignment.replayed
    return row.name == "bug" and replayed is not None and bool(replayed.persists) and True in replayed.repeats


def is_proven(row: Reason, alignment: Alignment) -> bool:
    """Whether what a reason needs was measured, beyond that nothing else explains the difference.

    An order of sums that varies needs a repetition that differs, or a difference inside the measured envelope of
    rounding. Damage needs that it is not there again: between two steps, that a later step was recorded that tells. And where
    a run has not the bits of its replay, code needs that it is there again.
    """
    replayed, difference = alignment.replayed, alignment.first_difference
    if row.name == "nondeterminism" and difference is not None:
        if replayed is None:
            return False
        varies = bool(replayed.persists) and True not in replayed.repeats
        return varies or (replayed.envelope is not None and alignment.is_rounding(difference) is True)
    if row.name == "silent-corruption" and difference is not None:
        once = difference.recurs is False or (replayed is not None and replayed.persists is False)
        is_known = _is_alone(difference, alignment) and difference.stage != "held"
        return once or is_known or bool(difference.ranks or difference.said)
    if row.name in _CODE and replayed is not None and False in replayed.repeats and replayed.persists is None:
        return bool(alignment.drift or (difference is not None and (difference.recurs or difference.lasts)))
    return True


def _of_rank(row: Reason, difference: FirstDifference) -> float:
    """How much likelier, or less likely, a reason is where one rank alone differs."""
    is_one = bool(difference.ranks or difference.said)
    if row.of_one_rank:
        return float(is_one)
    return 0.2 if is_one and row.name in (*_CODE, "nondeterminism") else 1.0


_ALONE, _SPREAD, _AGAIN = 30.0, 0.1, 10.0


def _of_tensor(row: Reason, difference: FirstDifference, alignment: Alignment) -> float:
    """How likely it is that one tensor alone is off: once, from a flipped bit; again in the next steps, from code."""
    if row.name == "silent-corruption":
        if difference.recurs or difference.lasts:
            return 0.0  # damage does not happen again in the next step
        return _ALONE if _is_alone(difference, alignment) or difference.recurs is False else 1.0
    if row.name in (*_CODE, "one-rank") and difference.recurs is not None:
        return _AGAIN if difference.recurs else _SPREAD
    if row.name == "nondeterminism" and difference.recurs:
        return _SPREAD  # it has no tensor of its own
    return 1.0


_EXCLUDED = 0.02


def _of_replays(row: Reason, alignment: Alignment) -> float:
    """How much less likely replays make a reason: damage does not happen twice, and settings act again."""
    replayed = alignment.replayed
    if replayed is None:
        return 1.0
    if row.name == "nondeterminism":
        return _EXCLUDED if True in replayed.repeats else 1.0
    if row.name == "silent-corruption":
        return _EXCLUDED if replayed.repeats == (True, True) or replayed.persists else 1.0
    if row.name in (*_CODE, "one-rank") and replayed.persists is False:
        return _EXCLUDED
    decided = deciding(row, alignment.differences)
    is_setting = bool(decided) and all(each.table in ("config", "data") for each in decided)
    return _EXCLUDED if is_setting and replayed.excludes_settings else 1.0


def _is_alone(difference: FirstDifference, alignment: Alignment) -> bool:
    """Whether one weight alone differs, between two steps or while its moments do not: no update of the trainer's does that.

    The update of a loop of one's own may: each group of parameters has its own rate and decay.
    """
    is_weight = difference.tensor.startswith("weight:") and difference.same_after > 0 and alignment.are_trainers
    return (difference.stage == "held" or is_weight) and difference.others[0] == 0


def deciding(row: Reason, found: tuple[SettingDifference, ...]) -> tuple[SettingDifference, ...]:
    """The differences between two runs that decide a reason."""
    return tuple(each for each in found if _is_named(each, row.decided_by))


def _is_named(difference: SettingDifference, names: tuple[str, ...]) -> bool:
    return f"{difference.table}.{difference.name}" in names or f"{difference.table}.*" in names
