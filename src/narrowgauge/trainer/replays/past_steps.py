"""A run in memory, before one of its past steps: from the nearest checkpoint on, or from its beginning, as the trainer stepped.

Nothing is written into the run folder and nothing is locked, so a live run can be replayed too. The session takes the same
batches, rates, loss scales and random bits as the run did, and leaves out the updates that it left out.

Every step on the way is compared with its recorded row and, where they were recorded, with the fingerprints of its tensors.
Numbers are recorded with all their digits, so equal computations have equal rows. A replay that differs was computed from other
values, or by other code or another machine, or the run itself was not what its settings say. So the first difference is
evidence.
"""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from narrowgauge.analysis.diagnosis.pairs.alignment import same_value
from narrowgauge.analysis.diagnosis.replay_findings import HELD, ReplayMismatch
from narrowgauge.analysis.monitor.spikes import Spike
from narrowgauge.checkpoints.saving import checkpoint_before
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.gauges.recording.provenance import differences
from narrowgauge.optim.accumulation import AccumulationWarning
from narrowgauge.runs.finding import counted, duration
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, finite_number
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset, open_data
from narrowgauge.trainer.micro_batches import skipped_batches_of
from narrowgauge.trainer.resume_checks import require_replayable
from narrowgauge.trainer.session import Session, build, describe
from narrowgauge.trainer.step import train_step

_OF_ONE_PROCESS: dict[str, Any] = {"replicas": 1, "offload": False, "narrow_gather": False, "verify_every": 0}
"""Settings of ranks, none of which changes a bit of what one process computes."""


Say = Callable[[str], object]
"""Called with a sentence before what takes a while."""
StepsDone = Callable[[int, int], object]
"""Called after each step with the number of those done and of all."""


def nothing(*_: object) -> None:
    """What nobody listens to."""


class RecordedJudgement:
    """Leaves out the update of a step that the run left out as a spike; stands in for the trainer's judgement."""

    def __init__(self, row: Row) -> None:
        self._is_left_out = "spike" in row and bool(row.get("skipped"))

    def judge_loss(self, value: float) -> float:
        """The gradient norm above which the update is not applied."""
        return -1.0 if self._is_left_out else float("inf")

    def judge_norm(self, value: float | None) -> Spike | None:
        """Nothing: the record has it."""
        return None


@dataclass(frozen=True, eq=False)
class Moment:
    """A copy of the state of a session: its weights, states, histories and counters.

    Example: ``before = Moment.of(session)``, then steps, then ``before.restore(session)``.
    """

    tensors: dict[str, Tensor]
    state: dict[str, Any]

    @classmethod
    def of(cls, session: Session) -> Moment:
        saved = session.state_dict()
        return cls({name: tensor.detach().clone() for name, tensor in saved["tensors"].items()}, saved["state"])

    def restore(self, session: Session) -> None:
        """Bring a session of the same model and recipe back to it."""
        session.optimizer.zero_grad(set_to_none=True)
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        session.load_state_dict({"tensors": tensors, "state": self.state})


@dataclass(eq=False)
class PastStep:
    """A run in memory, at a state of its past.

    Args:
        started: the step of the checkpoint that it was loaded from; 0 for the initial weights.
        reasons: in sentences, why the replay may differ from the record.
        notes: what else is worth a sentence.

    Attributes:
        mismatch: where the replay first differs from the record; ``None`` while it does not.
        not_compared: steps of which the record holds nothing to compare.
    """

    session: Session
    record: Run
    started: int
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mismatch: ReplayMismatch | None = None
    not_compared: list[int] = field(default_factory=list)

    def advance(self) -> Row:
        """Take the next step as the run did, and compare it with its row; returns the row of this replay."""
        number = self.session.step + 1
        recorded = _row_of(self.record.steps, number) or {}
        judgement: Any = RecordedJudgement(recorded) if self.session.config.on_spike != "report" else None
        row = train_step(self.session, judgement)
        if self.mismatch is None:
            printed = self.session.fingerprints.last
            is_printed = printed is not None and printed["step"] == number
            prints = _row_of(self.record.fingerprints, number) if is_printed else None
            if not is_compared(recorded, prints):
                self.not_compared.append(number)
            self.mismatch = first_mismatch(recorded, row, prints, printed)
            if self.mismatch is not None:
                self.reasons += differences(self.record.run, describe(self.session), "is replayed")
                self.reasons += _changes_on_the_way(self.record)
        return row


@contextmanager
def replaying(
    folder: str | Path,
    step: int,
    *,
    recipe: Recipe | None = None,
    prepared: Callable[[Session], Any] | None = None,
    perturb: Callable[[Session], Any] | None = None,
    say: Say = nothing,
    progress: StepsDone = nothing,
    **settings: Any,
) -> Iterator[PastStep]:
    """A run just before one of its steps; :meth:`PastStep.advance` takes the step.

    Invariant: nothing in the run folder changes, not even a lock.

    Args:
        step: number of the step that comes next, from 1.
        recipe: another recipe to go on in from the loaded state; its storage must hold the checkpoint's.
        prepared: called with the session once it is built, before a state is loaded: hooks on modules go here.
        perturb: called with the session at the loaded state, before any step is taken.
        say: called with a sentence before what takes a while.
        progress: called after each step on the way with the number of those done and of all.
        settings: other settings of the run, such as ``compile=False`` or ``fingerprints_every=1``.
    Raises:
        RecordError: no such run or step, or its data, model or checkpoint cannot be used.

    Cost: every step since the nearest checkpoint, once more.
    """
    run = require_replayable(Path(folder), step)
    config = dataclasses.replace(TrainConfig.from_dict(run.config, str(run.path / "run.toml")), **_OF_ONE_PROCESS)
    given: dict[str, Any] = {"recipe": recipe or config.recipe, **settings}
    config = dataclasses.replace(config, **given)
    data = open_data(run.path)
    data.require_same(run.data_fingerprint)
    with _threads_of(run), tempfile.TemporaryDirectory() as nowhere:
        say("Building the model.")
        past = _loaded(run, config, data, step, Path(nowhere), prepared)
        if perturb is not None:
            perturb(past.session)
        left = step - 1 - past.session.step
        if left:
            since = f"checkpoint {past.started}" if past.started else "the initial weights"
            say(f"Repeating {counted(left, 'step')} from {since} to step {step - 1}{expected_time([run], left)}.")
        for done in range(left):
            past.advance()
            progress(done + 1, left)
        yield past


def expected_time(runs: Sequence[Run], num_steps: int) -> str:
    """How long so many steps of each run take by their recorded durations, to follow what is said of them; empty if unknown.

    Example:
        >>> expected_time([Run(Path("a"), {}, steps=[{"step": 1, "seconds": 0.5}])], 240)
        ': about 2 min by the recorded steps'
    """
    known = [
        [seconds for row in run.steps if (seconds := finite_number(row.get("seconds"))) is not None] for run in runs
    ]
    if not all(known):
        return ""
    return f": about {duration(num_steps * sum(map(median, known)))} by the recorded steps"


def _loaded(
    run: Run, config: TrainConfig, data: Dataset, step: int, nowhere: Path, prepared: Callable[[Session], Any] | None
) -> PastStep:
    """The session at the nearest state before a step."""
    notes: list[str] = []
    session = _built(config, nowhere, data)  # in a folder of its own: a mistake here must not write into the run
    if prepared is not None:
        prepared(session)
    session.skipped_batches = skipped_batches_of(run.events)
    checkpoint = checkpoint_before(
        run.path, step - 1, lambda path, reason: notes.append(f"{path.name} is damaged ({reason})")
    )
    if checkpoint is not None:
        session.load(checkpoint)
    return PastStep(session, run, session.step, _other_order(run, config), notes)


def _changes_on_the_way(run: Run) -> list[str]:
    """What the run noted at its resumes: other settings, software or machines, which a replay does not repeat."""
    noted = [event for event in run.events if event.get("kind") == "note" and event.get("step")]
    return [f"the run noted after step {event['step']}: {event.get('message')}" for event in noted]


def _built(config: TrainConfig, folder: Path, data: Dataset) -> Session:
    """A session, without the warnings that the run gave at its start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccumulationWarning)
        return build(config, folder, data)


def _other_order(run: Run, config: TrainConfig) -> list[str]:
    """Why one process sums in another order than the ranks of the run did."""
    ranks = run.run.get("machine", {}).get("ranks", 1)
    if ranks == 1 or config.recipe.reduction.order_invariant:
        return []
    return [
        f"{ranks} ranks summed the gradients, each its own part first, and one process sums them in another order: gradients "
        "differ by rounding (they do not with the reduction 'reproducible')"
    ]


def _row_of(rows: list[Row], step: int) -> Row | None:
    """The last row of a step, which a rollback may have repeated."""
    return next((row for row in reversed(rows) if row["step"] == step), None)


@contextmanager
def _threads_of(run: Run) -> Iterator[None]:
    """As many threads as the run had, since sums inside a matrix product depend on them."""
    before, found = torch.get_num_threads(), run.run.get("machine", {}).get("num_threads")
    try:
        if isinstance(found, int) and found > 0:
            torch.set_num_threads(found)
        yield
    finally:
        torch.set_num_threads(before)


def in_other_recipe(session: Session, recipe: Recipe, **settings: Any) -> Session:
    """A second session at the same state in another recipe: the same stored weights and moments, cut to its storage."""
    config = dataclasses.replace(session.config, recipe=recipe, **settings)
    other = _built(config, session.folder, session.data)
    other.skipped_batches, other.step, other.tokens = session.skipped_batches, session.step, session.tokens
    own: dict[str, Tensor] = dict(session.named_parameters())
    theirs: dict[str, Tensor] = dict(other.named_parameters())
    trained = session.optimizer.parameter_names()
    values = {theirs[name]: session.optimizer.stored(p) for name, p in own.items() if p in trained}
    other.optimizer.adopt(values, {theirs[name]: _moments(session, p) for name, p in own.items() if p in trained})
    if other.linears is not None:
        other.set_compute()
        other.linears.step = session.step
        if session.linears is not None:
            other.linears.load_histories({name: t.clone() for name, t in session.linears.histories().items()})
    return other


def _moments(session: Session, parameter: Tensor) -> dict[str, Tensor | int]:
    """The states of a parameter in float32, and how many steps it has taken."""
    found: dict[str, Tensor | int] = {"step": session.optimizer.num_steps(parameter)}
    for name in ("exp_avg", "exp_avg_sq"):
        try:
            found[name] = session.optimizer.stored(parameter, name)
        except KeyError:  # a rule without this state
            continue
    return found


def require_finite(session: Session) -> None:
    """Refuse a state whose weights are not finite: nothing can be compared from there on."""
    for name, parameter in session.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise NarrowgaugeError(
                f"{name} is not finite before step {session.step + 1}, so the step cannot be compared with float32.",
                "Replay an earlier step.",
            )


# ── comparison with the record ──────────────────────────────────────────────────────────────────────────────────────

COLUMNS = ("batch_crc", "lr", "loss", "grad_norm", "skipped", "loss_scale")
"""Columns that the arithmetic of a step gives, in the order in which it gives them."""


def first_mismatch(
    recorded: Row, replayed: Row, prints: Row | None = None, printed: Row | None = None
) -> ReplayMismatch | None:
    """The first column or tensor in which a replayed step differs from the recorded one, or ``None``.

    ``prints`` and ``printed`` are its recorded and its replayed fingerprints, where there are both.

    Example:
        >>> row = {"step": 3, "loss": 2.5, "grad_norm": 1.0}
        >>> first_mismatch(row, {**row, "grad_norm": 1.25}).message
        'the replay first differs from the record at step 3: grad_norm is 1.25 and was 1.0'
    """
    step = replayed["step"]
    if prints is not None and printed is not None:
        found = _first_tensor(prints["tensors"], printed["tensors"])
        if found is not None:
            return ReplayMismatch(step, *found)
    for name in COLUMNS:
        if name in recorded and name in replayed and not same_value(recorded[name], replayed[name]):
            return ReplayMismatch(step, name, recorded[name], replayed[name])
    return None


def is_compared(recorded: Row, prints: Row | None) -> bool:
    """Whether the record of a step holds what another computation would change: its loss, or fingerprints of its tensors."""
    return "loss" in recorded or prints is not None


def _first_tensor(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> tuple[str, float, float] | None:
    """The first tensor with other bits, and its norms; tensors that one of the two did not record are left out."""
    changed = next((key for key in recorded if key.startswith(HELD)), None)
    if changed is not None:
        return changed, recorded[changed][1], float("nan")
    for key, entry in replayed.items():
        if key in recorded and int(recorded[key][0]) != int(entry[0]):
            return key, recorded[key][1], entry[1]
    return None
