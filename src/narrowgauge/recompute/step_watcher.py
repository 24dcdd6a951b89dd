"""Watches a training loop by hooks, and hands each sampled step to the pieces that compute it again.

Hooks stand on the optimizer's step, on the model's forward pass and, only before a sampled step, on the gradients of its
parameters. They copy, and change nothing: a loop has the same bits with and without them. What is kept is bounded
(:mod:`narrowgauge.recompute.capture`), and an error of the audit itself ends no run; the piece is then reported as not
checked.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import _torch
from narrowgauge._torch import plain_name
from narrowgauge._torch.own_hooks import OwnHook
from narrowgauge.numerics.shards import is_sharded
from narrowgauge.recompute.capture import (
    StepCapture,
    gradient_of,
    has_closure,
    number_of,
    rule_of,
    spread,
    spread_on_cpu,
    states_of,
    tokens_of,
    weight_of,
)
from narrowgauge.recompute.computed_gradients import LeftByBackward
from narrowgauge.recompute.inputs_and_outputs import float_outputs
from narrowgauge.recompute.kept_passes import KeptPasses
from narrowgauge.recompute.passes_again import unwrapped_model
from narrowgauge.recompute.piece_results import DEPARTS, EQUAL, NOT_CHECKED, PieceResult, not_checked
from narrowgauge.recompute.pieces.between_steps import AverageCheck, FewLeft, LeftAfterStep, check_between
from narrowgauge.recompute.pieces.clipping import ClipHistory, check_clip, scaled_by_hand
from narrowgauge.recompute.pieces.data import DataHistory, check_ranks
from narrowgauge.recompute.pieces.declared_settings import check_declared
from narrowgauge.recompute.pieces.evaluation import (
    EvaluationHistory,
    Reported,
    check_loss_of_evaluation,
    weights_sample,
)
from narrowgauge.recompute.pieces.evaluation_modes import EvaluationModes
from narrowgauge.recompute.pieces.forward import check_forward
from narrowgauge.recompute.pieces.gradient import check_after_backward, check_backward, is_own_multiple
from narrowgauge.recompute.pieces.loss import check_loss, cross_entropy_of
from narrowgauge.recompute.pieces.schedules import ScheduleHistory, check_resumed, rates_of
from narrowgauge.recompute.pieces.update import check_frozen, check_update
from narrowgauge.recompute.ranks.gradient_sums import as_sent, without
from narrowgauge.recompute.ranks.samples import RankSamples
from narrowgauge.recompute.ranks.whole_step import WholeStep, step_of_all
from narrowgauge.recompute.rules.definitions import DEFINITIONS
from narrowgauge.recompute.rules.own_step import own_step
from narrowgauge.recompute.step_samples import add_results, sampled_step
from narrowgauge.recompute.task import OWN, Task

_FEW = 8
"""Parameters whose counts are read in every step."""
_OF_PASSES = ("loss-scaled", "micro-batches-uneven")
"""Causes of the loss that say how often passes count, which may be several at other weights on purpose."""
_OF_TERMS = ("", "decay-in-gradient")
"""Causes of a gradient that a further term of the loss looks like."""
_OF_CAUSAL_MODELS = ("sees-future", "past-unseen", "order-unseen")
Report = Callable[[int, list[PieceResult]], object]


class StepWatcher:
    """Audits some steps of a loop.

    Args:
        model: as the loop calls it.
        optimizer: that steps it, without wrappers.
        every: steps between audited ones; 1 for all.
        report: called with the step and its results after each audited step, and again before the next with what changed in
            between.
        task: what is declared.
        first: the first audited step.
        gather: gives the value of each of several ranks, all of which have a watcher and so can compare their rows.
        is_told_losses: :meth:`evaluated` will be called, so the losses of evaluations are computed again, too.

    Attributes:
        num_steps: optimizer steps seen.
        nbytes: the largest capture so far.
        is_own_pass: the passes that are taken now are the audit's, not the loop's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        report: Report,
        task: Task | None = None,
        first: int = 2,
        gather: Callable[[Any], list[Any]] | None = None,
        is_told_losses: bool = False,
    ) -> None:
        self._first = first
        self.model, self.optimizer, self.every, self.task = model, optimizer, every, task or Task()
        self._inner, self._report = unwrapped_model(model), report
        self.num_steps, self.nbytes = 0, 0
        self._clips = ClipHistory()
        self._capture: StepCapture | None = None
        self._previous: dict[int, Tensor] = {}
        self._computed: dict[int, LeftByBackward] = {}
        self._kept, self.is_own_pass = KeptPasses(self._inner), False
        self._results: list[PieceResult] = []
        self._on_gradients: list[Any] = []
        self._left: LeftAfterStep | None = None
        self._few_left: FewLeft | None = None
        self._average = AverageCheck()
        self._modes = EvaluationModes(self._inner)
        self._ranks = RankSamples(model, f"{first} {every} {sum(1 for _ in self._inner.parameters())}")
        self._gather, self._is_told_losses = gather, is_told_losses
        self._counts_loss, self._counted = is_told_losses, ""
        self._schedules = ScheduleHistory(self.task.schedule, self._ranks.ranks)
        self._passes_of_step, self._was_averaging = 0, False
        self._usual_passes: deque[int] = deque(maxlen=4)
        self._begun, self._is_resumed = (0, 0), False
        self._skipped: int | None = None
        self._not_followed: dict[str, str] = {}
        self._was_training, self._version = False, -1
        self._names = {id(p): plain_name(name) for name, p in self._inner.named_parameters()}
        self.begin_data_anew()
        self._handles = [
            self._inner.register_forward_pre_hook(_plain(self._before_forward), with_kwargs=True),
            self._inner.register_forward_hook(_plain(self._after_forward), with_kwargs=True),
            optimizer.register_step_pre_hook(_plain(self._before_step)),
            optimizer.register_step_post_hook(_plain(self._after_step)),
        ]
        self._prepare()

    def begin_data_anew(self) -> None:
        """Forget the rows that were seen, as where a loop goes back to an earlier step."""
        self._data, self._evaluations = DataHistory(self.task.data), EvaluationHistory()
        self._follow("evaluation", lambda: self._evaluations.keep_weights(self.num_steps, self._held()))

    def go_on_from(self, step: int) -> None:
        """The loop goes on from a checkpoint that has done ``step`` steps; weights and states are loaded before the next.

        Args:
            step: 0 where it begins anew.
        """
        self._left, self._begun, self._is_resumed = None, (step, self.num_steps), step > 0
        self._few_left = None
        self._schedules.go_on_from(step, self.num_steps)
        self.begin_data_anew()

    def remove(self) -> None:
        """Remove every hook."""
        for handle in [*self._handles, *self._on_gradients]:
            handle.remove()
        self._handles, self._on_gradients = [], []

    def is_sampled(self, step: int) -> bool:
        """Whether a step is audited."""
        return step == self._first or (step > self._first and step % self.every == 0)

    @property
    def _is_sampling(self) -> bool:
        return self.is_sampled(self.num_steps + 1)

    def _prepare(self) -> None:
        """Hook the gradients if the step that begins is audited."""
        self._computed, self._was_averaging = {}, False
        self._kept.begin_step()
        if self._is_sampling and self._handles:
            trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
            self._on_gradients = [p.register_post_accumulate_grad_hook(_plain(self._after_gradient)) for p in trained]

    # ── forward and backward ────────────────────────────────────────────────────────────────────────────────────────

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self.is_own_pass or module is not self._inner:
            return
        if not torch.is_grad_enabled():
            self._follow("evaluation", self._modes.before_pass)
        else:
            self._keep(self._forget_skipped)
            self._keep(self._take_means)
            self._passes_of_step += 1
            self._follow("data", lambda: self._trained_on(tokens_of(args, kwargs)))
            if not self._kept.why_dropped:
                self._keep(lambda: self._kept.begin(args, kwargs))

    def _keep(self, function: Callable[[], object]) -> None:
        """Keep something of a pass of an audited step; after an error of its own, the inputs and outputs of none."""
        if not self._is_sampling:
            return
        try:
            function()
        except Exception as error:
            self._kept.drop(_reason(error))

    def _forget_skipped(self) -> None:
        """Forget the passes of a step that was left out, as a loss scaler does: all were taken, and the gradients are gone."""
        if self._kept.calls and len(self._kept.calls) == min(self._usual_passes, default=0):
            gone = [p for p in self._held().values() if id(p) in self._computed]
            if gone and all(p.grad is None or not bool(p.grad.any()) for p in gone):
                self._computed = {}
                self._kept.begin_step()

    def _take_means(self) -> None:
        """Note what the mean over ranks made of each gradient, since the pass that begins now adds to it."""
        if self._was_averaging:
            held = [p for p in self._held().values() if id(p) in self._computed]
            self._computed |= {id(p): self._computed[id(p)].averaged(p.grad) for p in held}
        self._was_averaging = self._ranks.is_averaging

    def _trained_on(self, tokens: Tensor | None) -> None:
        """Take the batch of a forward pass with gradients, unless it is one of evaluation."""
        self._was_training |= self._inner.training
        if tokens is None or self._was_training is not self._inner.training:
            return
        version = next(self._inner.parameters())._version
        if version != self._version:  # passes before were at other weights, of which only the last makes the step
            self._data.begin_step()
        self._version = version
        self._data.add(tokens)

    def _evaluated_on(self, tokens: Tensor | None, output: Any) -> None:
        logits = next((t for t in float_outputs(output).values() if t.ndim == 3), None) if self._counts_loss else None
        self._evaluations.add(self._held(), tokens, logits)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.is_own_pass or module is not self._inner:
            return
        if not torch.is_grad_enabled():
            self._follow("evaluation", self._modes.after_pass)
            self._follow("evaluation", lambda: self._evaluated_on(tokens_of(args, kwargs), output))
        elif self._kept.calls:
            self._keep(lambda: self._kept.end(output))

    def _after_gradient(self, parameter: Tensor) -> None:
        self._keep(lambda: self._keep_gradient(parameter))

    def _keep_gradient(self, parameter: Tensor) -> None:
        self._kept.settle()
        if (gradient := gradient_of(parameter)) is not None:
            self._computed[id(parameter)] = LeftByBackward.of(gradient, self._computed.get(id(parameter)))

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._capture = None
        self._follow("between", self._follow_schedules)
        is_closure = has_closure(args, kwargs)
        if self._left is not None or self._evaluations.is_open:
            self._results = []
            self._guarded("between", self._compare_with_left)
            self._left = None
            if self._evaluations.is_open:
                self._follow("evaluation", self._end_evaluation)
            self._report(self.num_steps, self._results)
        self._follow("between", self._compare_few)
        if not is_closure:
            self._end_data()
        if not self._is_sampling:
            return None
        if not is_closure:
            self._capture_step()
            return None
        if not rule_of(optimizer):  # it may call its closure more than once
            return None
        return tuple(map(self._then_capture, args)), {name: self._then_capture(each) for name, each in kwargs.items()}

    def _follow_schedules(self) -> None:
        optimizer, is_search = self.optimizer, self._is_sampling or self.num_steps == 0 or self._is_resumed
        may_skip = is_search and (_torch.scaler_of_step() is not None or own_step(optimizer).loss_scale != 1.0)
        passes, self._passes_of_step = self._passes_of_step, 0
        self._usual_passes.append(passes)
        first = itertools.islice((p for group in optimizer.param_groups for p in group["params"]), _FEW)
        count = max((_host_number(optimizer, p) for p in first), default=0)
        self._schedules.begin_step(optimizer, self.num_steps, passes, count, is_search=is_search, may_skip=may_skip)
        found = self._schedules.results(self.num_steps) if self._is_sampling else []
        if self._is_resumed:
            self._is_resumed = False
            found += self._check_resumed()
        if found:
            self._report(self.num_steps, found)

    def _check_resumed(self) -> list[PieceResult]:
        optimizer = self.optimizer
        rule = DEFINITIONS.get(rule_of(optimizer))
        held = [(p, group) for group in optimizer.param_groups for p in group["params"]] if rule else []
        states = (
            (name, name in found and bool(found[name].any()))
            for p, group in held
            for found in [states_of(optimizer, p)]
            for name in DEFINITIONS[rule_of(optimizer, p)].keeps(group)
        )
        counts = (number_of(optimizer, p) for p, _ in held)
        return check_resumed(rule is not None and rule.is_counted, self._begun[0], counts, states, self._skipped)

    def _then_capture(self, closure: Any) -> Any:
        """A closure after which gradients are there, as frameworks pass one to the optimizer's step; others as they are."""
        if not callable(closure):
            return closure

        def call() -> Any:
            loss = closure()
            self._end_data()
            self._capture_step()
            return loss

        return call

    def _end_data(self) -> None:
        """The rows of this step are complete: before it, or once its closure was called. A second call finds none."""
        self._follow("data", lambda: self._data.end_step(self.num_steps + 1))

    def _capture_step(self) -> None:
        self._results = []
        self._guarded("update", self._take)
        step = self._capture
        try:
            over_ranks = step_of_all(
                self._ranks,
                self.num_steps + 1,
                step,
                self._held(),
                self._computed,
                self.optimizer,
                is_sharded=self._is_sharded,
            )
        except Exception as error:
            over_ranks = _reason(error)
        if step is not None:
            self._guarded("gradient", lambda: self._results.extend(self._again(step, over_ranks)))
        self._follow("data", lambda: self._results.extend(self._data.results(self.num_steps + 1)))
        self._compare_ranks()
        self._results.extend(not_checked(name, why, self.num_steps + 1) for name, why in self._not_followed.items())
        self._counts_loss = self._is_told_losses

    def _end_evaluation(self) -> None:
        held = self._held()
        dtype = next(iter(held.values())).dtype
        self._results.extend(self._evaluations.end(self.num_steps, held, self._data, dtype))

    def evaluated(self, loss: float) -> None:
        """Compare a loss that the loop reports of the passes without gradients since its last step.

        Only the first evaluation after an audited step is compared, since its losses are computed a second time.

        Args:
            loss: in nats per token.
        """
        losses, self._evaluations.losses = self._evaluations.losses, []
        earlier = self._evaluations.reported
        self._evaluations.reported = Reported(earlier.number + 1, loss)
        if self._counts_loss and losses and self._gather is None:
            self._counts_loss = False
            self._results = []

            def compare() -> None:
                found = check_loss_of_evaluation(losses, loss, self._counted, self.num_steps, earlier)
                self._results.extend(self._evaluations.once(found))

            self._guarded("evaluation", compare)
            self._report(self.num_steps, self._results)

    def _compare_ranks(self) -> None:
        """Every rank asks the others, also one whose own part failed: the others would wait for it."""
        if self._gather is None:
            return
        own: list[tuple[int | None, bytes]] = [(None, b"")]

        def tell() -> None:
            weights = hashlib.blake2b(weights_sample(self._held()).numpy().tobytes(), digest_size=8)
            own[0] = (self._data.batch_hash(), weights.digest())

        self._follow("data", tell)
        told_by_rank = self._gather(own[0])
        self._follow("data", lambda: self._results.extend(check_ranks(self.num_steps + 1, told_by_rank)))

    def _take(self) -> None:
        calls = [call for call in self._kept.calls if call.has_gradients]
        for call in calls:
            call.cross_entropy = cross_entropy_of(call) if call.sampled else None
        step = sampled_step(
            self.num_steps + 1, self.optimizer, self._inner, self._names, self._computed, self._previous, calls
        )
        step.ranks = self._ranks.num_summed
        if self._kept.why_dropped:
            step.missing["calls"] = self._kept.why_dropped
        self._capture = step

    @property
    def _is_sharded(self) -> bool:
        return any(map(is_sharded, self._inner.parameters()))

    def _again(self, step: StepCapture, over_ranks: WholeStep | str) -> list[PieceResult]:
        """What must be computed before the update: passes through the model, with the weights that they had."""
        passes, named = self._passes(step), list[PieceResult]()
        if self.task.gradient == OWN:
            why = "declared as changed on purpose before the step"
            passes = [each for each in passes if each.cause not in _OF_PASSES]
            return [*passes, *(not_checked(piece, why, step.step) for piece in ("gradient", "clip"))]
        if self._ranks.ranks > 1 and (self._is_sharded or self._ranks.is_parallel or not is_own_multiple(step)):
            if not isinstance(over_ranks, str):
                step, named = over_ranks
            elif not self._is_sharded:
                return [*passes, *(not_checked(piece, over_ranks, step.step) for piece in ("gradient", "clip"))]
        if (scale := scaled_by_hand(step, passes)) != 1.0:
            step = replace(step, loss_scale=scale * step.loss_scale)
            passes = [_without_cause(each) if each.cause == "loss-scaled" else each for each in passes]
        changed = check_after_backward(without(step, named), self.task.max_grad_norm)
        if self._ranks.has_hook:
            changed = as_sent(changed, step)
        departs = [each for each in named if each.status == DEPARTS]
        if departs or any(each.status != EQUAL for each in changed):
            clip = [not_checked("clip", "the gradients were changed otherwise, too", step.step)]
        else:
            clip = check_clip(step, self._clips, self.task.max_grad_norm)
        return [*passes, *named, *changed, *clip]

    def _passes(self, step: StepCapture) -> list[PieceResult]:
        if why := step.missing.get("calls") or self._why_not_again():
            pieces = ("forward", "gradient")
            return [*check_loss(step, self.task), *(not_checked(piece, why, step.step) for piece in pieces)]
        loss = check_loss(step, self.task)
        self._counted = next((str(each.values["counted"]) for each in loss if "counted" in each.values), "")
        try:
            forward = check_forward(step, self._inner)
        except Exception as error:
            forward = [not_checked("forward", _reason(error), step.step)]
        try:
            backward = check_backward(step, self._inner) if self.task.gradient != OWN else []
        except Exception as error:
            backward = [not_checked("gradient", _reason(error), step.step)]
        has_terms = self.task.auxiliary or any(call.before.keeps_graph for call in step.calls)
        if has_terms and any(each.cause in _OF_TERMS for each in backward if each.status == DEPARTS):
            backward = [not_checked("gradient", "terms of the loss that come not from the logits add to it", step.step)]
        if any(each.status == NOT_CHECKED for each in loss):  # the next token is not known to be predicted
            forward = [each for each in forward if each.cause not in _OF_CAUSAL_MODELS] or [
                not_checked("forward", "no loss of a next token is known, which may not be seen", step.step)
            ]
        return [*loss, *forward, *backward]

    def _why_not_again(self) -> str:
        if self._is_sharded:
            return "parameters are sharded over ranks"
        if why := self._kept.why_not_again:
            return why
        # A model's own exchange with other ranks must not be called by some of them alone.
        return self._ranks.why_not(self.num_steps + 1) if self._ranks.ranks > 1 else ""

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step, self._capture = self._capture, None
        if step is not None:
            self._guarded("update", lambda: self._finish(step))
        for handle in self._on_gradients:
            handle.remove()
        self._on_gradients = []
        if has_closure(args, kwargs) and not rule_of(optimizer):
            self._data.begin_step()  # its closure takes the same batch as often as it likes
        else:
            self._end_data()
        self.num_steps += 1
        self._follow("between", self._keep_few)
        # The gradients of this step, where the next one is audited: before they are set to None.
        self._previous = {}
        if self._is_sampling:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            self._previous = {id(p): spread(g) for p in held if (g := gradient_of(p)) is not None}
        self._prepare()
        if step is not None:
            results, self._results = self._results, []
            self._report(self.num_steps, results)

    def _finish(self, step: StepCapture) -> None:
        optimizer = self.optimizer
        add_results(step, optimizer, self._held())
        self.nbytes = max(self.nbytes, step.nbytes)
        if "update" in step.missing:
            self._results.append(not_checked("update", step.missing["update"], step.step))
        else:
            self._results.extend(check_update(step))
        for place, each in enumerate(self._results):
            if each.cause == "rate":
                sample = step.parameters[each.where[0] if each.where else next(iter(step.parameters))]
                self._results[place] = self._schedules.named(each, sample.group, step.step, rates_of(optimizer))
        counted = max((sample.number for sample in step.parameters.values()), default=0)
        self._skipped = self._begun[0] + step.step - self._begun[1] - counted if counted else None
        self._results.extend(check_frozen(step))
        for sample in step.parameters.values():
            sample.whole = None  # what is compared with the next step are samples
        self._results.extend(check_declared(step, self.task, optimizer.param_groups))
        self._follow("evaluation", lambda: self._evaluations.keep_weights(step.step, self._held()))
        self._left = LeftAfterStep(step.step, step.parameters, step.outside, self._averages())

    def _held(self) -> dict[str, Tensor]:
        """The parameters of the optimizer by the model's names."""
        return {self._names.get(id(p), ""): p for group in self.optimizer.param_groups for p in group["params"]}

    def _averages(self) -> dict[str, Tensor]:
        averages = self.task.averages
        begun = getattr(averages, "n_averaged", None)  # AveragedModel's, which may begin late
        if averages is None or (isinstance(begun, Tensor) and not begun.any()):
            return {}
        return {plain_name(n).removeprefix("module."): spread_on_cpu(p) for n, p in averages.named_parameters()}

    def _keep_few(self) -> None:
        is_known = bool(rule_of(self.optimizer)) and self._left is None
        self._few_left = FewLeft(self.num_steps, self.optimizer, self._held()) if is_known else None

    def _not_meant(self, between: list[PieceResult]) -> list[PieceResult]:
        """What changed between two steps, without what is declared to."""
        return [each for each in between if self.task.weights != OWN or "state" in each.values]

    def _compare_few(self) -> None:
        few, self._few_left = self._few_left, None
        if few is not None and (found := self._not_meant(few.check())):
            self._report(self.num_steps, found)

    def _compare_with_left(self) -> None:
        left, optimizer = self._left, self.optimizer
        if left is None:
            return
        held = {name: p for name, p in self._held().items() if name in left.parameters}
        left.parameters = {name: sample for name, sample in left.parameters.items() if name in held}
        named = {plain_name(n): p for n, p in self._inner.named_parameters()}
        found = check_between(
            left,
            {name: spread_on_cpu(weight_of(optimizer, p)) for name, p in held.items()},
            {name: states_of(optimizer, p, spread_on_cpu) for name, p in held.items()},
            {name: spread_on_cpu(named[name]) for name in left.outside if name in named},
            {name: number_of(optimizer, p) for name, p in held.items()},
        )
        self._results.extend(self._not_meant(found))
        self._results.extend(self._average.check(left, self._averages()))
        self._results.extend(self._modes.results(left.step))

    def _follow(self, piece: str, function: Callable[[], object]) -> None:
        """Call what follows the loop in every step; after an error of its own it is called no more."""
        if piece in self._not_followed:
            return
        try:
            with torch.no_grad():
                function()
        except Exception as error:
            self._not_followed[piece] = _reason(error)

    def _guarded(self, piece: str, function: Callable[[], object]) -> None:
        """Call a part of the audit; an error of its own is a result, and not the end of the run."""
        self.is_own_pass = True
        try:
            with torch.no_grad():
                function()
        except Exception as error:
            self._results.append(not_checked(piece, _reason(error), self.num_steps + 1))
        finally:
            self.is_own_pass = False


def _reason(error: Exception) -> str:
    said = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {said}"[:200]


def _without_cause(result: PieceResult) -> PieceResult:
    """A departure that the loop itself takes back."""
    return replace(result, status=EQUAL, cause="", values={})


def _host_number(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
    """The optimizer's count of a parameter's steps; 0 where reading it would wait for a device, or nothing is counted."""
    count = optimizer.state.get(parameter, {}).get("step")
    return 0 if isinstance(count, Tensor) and count.device.type != "cpu" else number_of(optimizer, parameter)


def _plain(function: Callable[..., Any]) -> OwnHook:
    """A hook that the compiler, if it is loaded, does not trace."""
    return OwnHook(torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function)
