"""Two runs computed again side by side: the first step and tensor in which they differ, whatever was recorded.

The rows of two runs bracket the step. Both are loaded from the newest checkpoint before it at which their weights are still
equal, and stepped forward with every tensor hashed. A run that can be repeated has its own fingerprints now. One that cannot
was computed by other code, on another machine, or was damaged; a later checkpoint tells these apart, since damage does not happen
twice.

How far rounding alone would carry the tensor is measured too: the step is taken again with weights changed by one ulp of
float32, a few times. A difference beyond that has a cause; one within it may be another order of sums.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from narrowgauge.analysis.diagnosis.pairs.first_difference import FirstDifference, by_step, relative_difference
from narrowgauge.analysis.diagnosis.pairs.two_runs import TwoRuns, compare_two
from narrowgauge.analysis.diagnosis.replay_findings import MeasuredEnvelope, ReplayedPair, ReplayMismatch
from narrowgauge.checkpoints.saving import checkpoint_before
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.replays.past_steps import Moment, PastStep, Say, StepsDone, expected_time, nothing, replaying
from narrowgauge.trainer.session import Session

_ROUNDED = ("output", "grad", "update")
"""Stages whose tensors rounding moves."""


@dataclass(frozen=True, eq=False)
class _Repeated:
    """Some steps of a run, computed again."""

    prints: list[Row]
    mismatch: ReplayMismatch | None
    undecided: str
    notes: list[str]

    @property
    def repeats(self) -> bool | None:
        """Whether it has the bits of the record; ``None`` where that cannot be known, for the reason ``undecided``."""
        return None if self.undecided else self.mismatch is None


def compare_exactly(
    one: str | Path, other: str | Path, *, num_replays: int = 3, say: Say = nothing, progress: StepsDone = nothing
) -> TwoRuns:
    """Find where two runs first differ, and why, by computing both again around the first step that differs.

    Invariant: nothing in the run folders changes.

    Args:
        one, other: run folders, with their data.
        num_replays: how often the step is repeated with changed weights; 0 does not measure how far rounding reaches.
        say: called with a sentence before what takes a while, the first of them with the time that both take by their records.
        progress: called after each step of a stretch with the number of those done and of all in it.
    Returns:
        As :func:`~narrowgauge.analysis.diagnosis.pairs.two_runs.compare_two`, with what the replays say.
    Raises:
        RecordError: one of the two cannot be replayed; see :func:`~narrowgauge.trainer.replays.past_steps.replaying`.

    Cost: for both, every step since the last checkpoint that they have in common; then, since the nearest one, once more.
    """
    runs = read_run(Path(one)), read_run(Path(other))
    found = compare_two(*runs)
    difference = found.alignment.first_difference
    if difference is None or difference.step == 0:
        return found
    since = common_state(*runs, before=difference.step - (1 if _is_located(difference) else 2))
    while True:
        time = expected_time(runs, difference.step - since)
        say(f"Both runs are computed again from step {since + 1} to step {difference.step}{time}.")
        repeated = [_repeat(run, since, difference.step, say, progress) for run in runs]
        first, second = (each.prints[0]["tensors"] for each in repeated)
        if since == 0 or {key: entry[0] for key, entry in first.items()} == {
            key: entry[0] for key, entry in second.items()
        }:
            break
        since = common_state(*runs, before=since - 1)  # the weights were equal there, and a moment was not
    replayed = _replayed(runs, since, repeated, say)
    if replayed.repeats == (True, True):
        runs = _with_prints(runs[0], repeated[0].prints), _with_prints(runs[1], repeated[1].prints)
    located = compare_two(*runs, replayed).alignment.first_difference
    if located is not None and num_replays > 0 and located.tensor and located.stage in _ROUNDED:
        envelope = measure_envelope(runs[0], located.step, located.tensor, num_replays, say, progress)
        replayed = dataclasses.replace(replayed, envelope=envelope)
    return compare_two(*runs, replayed)


def _is_located(difference: FirstDifference) -> bool:
    return bool(difference.tensor) and difference.equal_until == difference.step - 1


def common_state(one: Run, other: Run, before: int) -> int:
    """The step of the newest checkpoint, up to step ``before``, that two runs both have with equal weights; 0 without one."""
    step = before
    while step > 0:
        found = [checkpoint_before(run.path, step, lambda path, reason: None) for run in (one, other)]
        if found[0] is None or found[1] is None:
            return 0
        first, second = found[0], found[1]
        if first.step == second.step:
            if first.state()["fingerprint"] == second.state()["fingerprint"]:
                return first.step
            step = first.step - 1
        else:
            step = min(first.step, second.step)
    return 0


def _repeat(run: Run, since: int, last: int, say: Say, progress: StepsDone) -> _Repeated:
    """The steps after a state, hashed."""
    say(f"Repeating steps {since + 1} to {last} of {run.path}, with every tensor hashed.")
    with replaying(run.path, since + 1, fingerprints_every=1) as past:
        prints = past.session.fingerprints
        prints.before_first(past.session.step)
        rows = [prints.last]
        while past.session.step < last:
            past.advance()
            rows.append(prints.last)
            progress(past.session.step - since, last - since)
        found = [row for row in rows if row is not None]
        undecided = _undecided(past)
        return _Repeated(found, past.mismatch, undecided, past.notes + ([] if undecided else past.reasons))


def _undecided(past: PastStep) -> str:
    """Why a replay without a difference does not prove that the run is repeated; empty if it does."""
    ranks = past.record.run.get("machine", {}).get("ranks", 1)
    if ranks > 1 and not past.session.config.recipe.reduction.order_invariant:
        return "was trained on several ranks, which sum in another order than the process of a replay"
    if past.mismatch is None and past.not_compared:
        return f"has no loss of step {past.not_compared[0]} to compare with"
    return ""


def _replayed(runs: tuple[Run, Run], since: int, repeated: list[_Repeated], say: Say) -> ReplayedPair:
    said: list[str] = []
    again: list[bool | None] = []
    for run, each in zip(runs, repeated, strict=True):
        said += [f"{run.path.name}: {note}" for note in each.notes]
        if each.undecided:
            said.append(f"{run.path.name} {each.undecided}")
        elif each.mismatch is not None:
            said.append(f"of {run.path.name}, {each.mismatch.message}")
            again.append(_persists(run, each.mismatch.step, say))
            if again[-1] is not None:
                how = "differs from its replay again" if again[-1] else "has the bits of its replay again"
                said.append(f"from a later checkpoint on, {run.path.name} {how}")
    persists = None if not again or None in again else True in again
    tables = [[{key: entry[0] for key, entry in row["tensors"].items()} for row in each.prints] for each in repeated]
    one, other = repeated
    return ReplayedPair(since, (one.repeats, other.repeats), tables[0] == tables[1], tuple(said), persists)


def _persists(run: Run, step: int, say: Say) -> bool | None:
    """Whether a run differs from its replay again, in the first step after a checkpoint that was written later."""
    last = int(run.steps[-1]["step"])
    later = checkpoint_before(run.path, last - 1, lambda path, reason: None)
    if later is None or later.step < step:
        return None
    say(f"Repeating step {later.step + 1} of {run.path}.")
    with replaying(run.path, later.step + 1) as past:
        past.advance()
        return past.mismatch is not None


def _with_prints(run: Run, rows: list[Row]) -> Run:
    """The run as if these rows of fingerprints had been recorded, where none were."""
    known = by_step(run)
    joined = [*known.values(), *(row for row in rows if row["step"] not in known)]
    return run.with_fingerprints(sorted(joined, key=lambda row: int(row["step"])))


def measure_envelope(
    run: Run, step: int, tensor: str, num_replays: int, say: Say = nothing, progress: StepsDone = nothing
) -> MeasuredEnvelope | None:
    """How far one-ulp changes of every weight carry a tensor in one step.

    Args:
        tensor: ``KIND:NAME`` of a fingerprint.
        num_replays: how often, each time with other signs.
        say, progress: see :func:`compare_exactly`.
    Returns:
        The changes of its norm, or ``None`` where the replay does not make that tensor or its norm is not finite.

    Cost: ``1 + num_replays`` steps after those since the nearest checkpoint.
    """
    time = expected_time([run], num_replays + 1)
    say(f"Repeating step {step} of {run.path} {num_replays} times with weights changed by one ulp of float32{time}.")
    with replaying(run.path, step, fingerprints_every=1, progress=progress) as past, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer notices that its weights were changed
        before, norms = Moment.of(past.session), []
        for seed in range(num_replays + 1):
            if seed:
                before.restore(past.session)
                shift_weights(past.session, seed)
            past.advance()
            row = past.session.fingerprints.last
            norms.append(row["tensors"].get(tensor, (0, math.nan))[1] if row is not None else math.nan)
            progress(seed + 1, num_replays + 1)
    changes = tuple(relative_difference(norms[0], norm) for norm in norms[1:])
    return MeasuredEnvelope(step, tensor, changes) if changes and all(map(math.isfinite, changes)) else None


@torch.no_grad()
def shift_weights(session: Session, seed: int) -> None:
    """Change the weights of a session by an ulp of float32, up or down by a draw, and round them to their format at random.

    Rounding changes the last digit of a float32 sum. So in a narrower format most weights stay, and a few become their
    neighbours: in bfloat16 one of 65,536, and at least one of each tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in session.named_parameters():
        draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.device)
        share = torch.finfo(torch.float32).eps / torch.finfo(parameter.dtype).eps
        moved = (draw < share) | (draw == draw.amin())
        up = torch.randint(2, parameter.shape, generator=generator).to(parameter.device).bool()
        bound = torch.where(up, math.inf, -math.inf).to(parameter.dtype)
        parameter.copy_(torch.where(moved, torch.nextafter(parameter, bound), parameter))
