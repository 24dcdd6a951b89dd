"""Check the gradient of a set-up: one configured step beside its shadow, and beside the plain loss in
one process.

The configured pass runs on the model itself, before training: with its mode, autocast,
accumulation, loss scale, recomputation or DDP. Nothing of it stays. Beside it runs its shadow, the
same pass without roundings (:mod:`narrowgauge.checks.shadow`).

- *rounding* is the gradient minus that shadow: a number, divided among places
  (:mod:`narrowgauge.checks.rounding`).
- *structure* is that shadow minus the shadow of the plain loss of the whole batch, on the same model:
  factors, micro-batches, reductions, missing terms. It is fitted by one factor, or by a number for
  each micro-batch and rank.
- *slope* is the second shadow in float64 beside the loss (:mod:`narrowgauge.checks.slope`).

Reductions over ranks, and shards, are not followed. There the plain pass runs in one process over
the batches of all ranks, of FSDP2's shards in a gathered copy, and its roundings give the bound. A
gradient that is not followed through a kernel is named, and is compared within coarse bounds.

Source of one bound per tensor: TTrace (2506.09280).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, joined, of_all, words_of
from narrowgauge.checks.fit import fit
from narrowgauge.checks.float32_copy import gathered_copy
from narrowgauge.checks.passes import (
    Backward,
    Gradients,
    Loss,
    OneProcess,
    Pass,
    Passes,
    concatenated,
    leaves_of,
    micro_batches,
)
from narrowgauge.checks.rounding import Rounding, distances, lengths, rounding_of
from narrowgauge.checks.set_up import NARROW, SetUp, inner_name
from narrowgauge.checks.shadow import Shadow
from narrowgauge.checks.sites import is_finite, tensors_in
from narrowgauge.checks.slope import Slope
from narrowgauge.checks.step_samples import evenly_spread
from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.distributed.replica_verification import possible_parts
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.runs.finding import counted
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.torch_hooks import has_own_hooks
from narrowgauge.torch_support.torch_names import unwrapped_model

MARGIN = 4.0
"""Bounds of what has no shadow, over the roundings of the plain pass."""
COARSE = 32.0
"""The same bound, in roundings of the step's products, where no pass is followed."""
STOPPED = 0.03
"""Bound where a pass rounds to integers on purpose: one value of many lands elsewhere."""
_NEAR = 0.005
"""Relative distance within which a factor equals a number of the set-up."""
MOST_TERMS = 16
"""Fit the weight of each micro-batch in a gradient up to this number of micro-batches of all ranks.
"""
LEAST_VOCABULARY = 16
"""Rows of the smallest embedding that counts as one of tokens."""


class Measured(NamedTuple):
    """What a step's gradient was found to be: the same on every rank.

    Args:
        judged: what was compared.
        gradients: of the configured step, by name.
        products: number of products by the format of their operands.
        value: the plain loss of the whole batch; NaN if it was not read.
    """

    readings: list[Reading]
    lines: list[str]
    judged: list[str]
    gradients: Mapping[str, Tensor] = {}
    products: Mapping[str, int] = {}
    value: float = math.nan


def gradient_readings(
    set_up: SetUp, batch: Any, loss: Loss, backward: Backward | None, unseen: dict[str, str]
) -> Measured:
    """Compare the gradients of one configured step with their shadow, with the plain loss, and with
    the slope of the loss.

    All ranks make the call.

    Args:
        unseen: filled with the names that could not be compared, and the reasons.
    """
    model = set_up.model
    ranks = all_ranks()
    reason = _why_none(model)
    if reason:
        unseen["the gradient"] = reason
        return Measured([], [], [])
    leaves = leaves_of(set_up)
    parts = micro_batches(model, batch, loss)
    passes = Passes(model, set_up.optimizers, leaves, parts, batch, loss, backward, unseen)
    has_shards = any(map(is_sharded, model.parameters()))
    follows = ranks.size == 1 and not has_shards
    before = {name: (p._version, p.detach().clone()) for name, p in leaves.items()}
    if follows:
        first, rounding = rounding_of(passes, passes.step)
    else:
        first = passes.run(passes.step, None)
        rounding = None
    stepped = _stepped(leaves, before)
    del before
    if stepped:
        kind = KINDS["step-in-backward"]
        if all(has_own_hooks(leaves[name]) for name in stepped):  # on purpose
            kind = replace(kind, severity="note")
        return Measured([*kind.of(stepped)], [], [])
    step = first
    draws = bool(ranks.largest(int(first.draws)))
    if draws:
        passes.is_training = False
        step = passes.run(passes.step, Shadow() if follows else None)
        draws = bool(ranks.largest(int(step.draws)))
    differing = _differing_ranks(step.gradients, ranks)
    in_parts = set[str]()
    if differing:
        in_parts = possible_parts(weights_of_ranks(model, ranks)).intersection(differing)
    if in_parts:
        # One process would wait for the others in the model's own collectives.
        names = of_all(sorted(in_parts))
        unseen["the gradient"] = f"ranks hold parts of {names}: no process has the whole model"
        return Measured([], [], [])
    of_ranks = ranks.gather(parts)
    alone = _alone(passes, [*chain.from_iterable(of_ranks)], has_shards, follows)

    def compare() -> tuple[Measured, dict[str, str]]:
        reasons = dict[str, str]()
        compared = _Compared(alone, first, step, rounding, differing, ranks.size, reasons)
        readings = [*_equal_batches(model, of_ranks)]
        one: Any = nullcontext()
        if not follows:
            one = OneProcess()  # type: ignore[no-untyped-call]
        with one, reason_for_none("the slope of the loss", reasons):
            readings += compared.slope()
        with one, reason_for_none("the gradient", reasons):
            readings += compared.rounding_readings()
            readings += compared.structure(draws=draws)
        products = compared.products
        measured = Measured(readings, compared.lines, compared.judged, {}, products, compared.value)
        return measured, reasons

    measured, reasons = ranks.of_first(compare)
    unseen |= reasons
    measured.readings.extend(KINDS["missing-parameters"].of(first.unstepped))
    measured.lines.extend(coarse_loss(first.loss))
    return measured._replace(gradients=first.gradients)


def _why_none(model: nn.Module) -> str:
    """Return why the gradients of a model are not compared; empty if they are."""
    for p in model.parameters():
        if p.is_complex():
            return "complex parameters"
        if isinstance(getattr(p, "main_grad", None), Tensor):
            return "a kernel adds to main_grad, where a copy has none"
    return ""


def _stepped(leaves: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the tensors that the passes changed, and put them back."""
    stepped = []
    for name, (version, values) in before.items():
        p = leaves[name]
        if is_sharded(p):  # FSDP2 writes its shards itself
            continue
        if p._version != version or not torch.equal(p, values):
            stepped.append(name)
            p.data.copy_(values)
    return stepped


def _alone(passes: Passes, parts: list[Any], has_shards: bool, follows: bool) -> Passes:
    """Return the passes of one process over the batches of all ranks; of shards, in a copy."""
    if follows:
        return passes
    model = unwrapped_model(passes.model)
    leaves = passes.leaves
    if has_shards:
        model = gathered_copy(passes.model)
        own = {inner_name(n): p for n, p in model.named_parameters() if p.requires_grad}
        leaves = leaves | own
    return replace(passes, model=model, optimizers=[], leaves=leaves, parts=parts, backward=None)


@contextmanager
def reason_for_none(area: str, reasons: dict[str, str]) -> Iterator[None]:
    """Note why an area is not compared: a kernel that takes other formats, too little memory, no
    slope.
    """
    try:
        yield
    except NarrowgaugeError:
        raise
    except Exception as error:
        reasons[area] = words_of(error)


class _Compared:
    """The step of a set-up beside the plain loss in one process.

    Args:
        alone: makes the passes of one process.
        first: the configured step; ``step`` in the mode in which structure is compared.
        rounding: of the configured step; ``None`` where it is not followed.
        differing: number of ranks with other gradients, by tensor.
    """

    def __init__(
        self, alone: Passes, first: Pass, step: Pass, rounding: Rounding | None, differing: Mapping[str, int],
        num_ranks: int, unseen: dict[str, str],
    ) -> None:  # fmt: skip
        self.alone = alone
        self.first = first
        self.step = step
        self.follows = rounding is not None
        self.measured = rounding
        self.differing = differing
        self.num_ranks = num_ranks
        self.unseen = unseen
        self.whole = concatenated(alone.parts)
        self.lines = list[str]()
        self.judged = list[str]()
        self.products = Counter[str]()
        self.is_sum = True
        self.value = math.nan
        self._terms: list[Gradients] | None = None

    def slope(self) -> list[Reading]:
        """Return a reading where the gradient is not the slope of the loss."""
        is_training = self.alone.is_training
        self.alone.is_training = True
        try:
            slope = Slope(self.alone, self.whole)
            readings = slope.readings()
        finally:
            self.alone.is_training = is_training
        self.judged.append("the slope of the loss")
        if not readings:
            count = counted(len(slope.names), "tensor")
            line = f"slope: the loss changes as the gradient of {count} says, within {slope.largest:.0e}"
            self.lines.append(f"{line}, in training mode")
        return readings

    def rounding_readings(self) -> list[Reading]:
        """Return the readings of what rounds, and of values that are not finite."""
        readings = []
        rounding = self.measured
        of_copy = ""
        if rounding is None:
            of_copy = "in a copy in one process, "
            passes = replace(self.alone, is_training=self.step is self.first)
            _, rounding = rounding_of(passes, passes.step)
            self.measured = rounding
        self.products = rounding.mode.products
        first, *more = rounding.lines()
        count = counted(len(self.first.gradients), "tensor")
        self.lines += [f"gradients of {count}: {of_copy}{first}", *more]
        self.judged.insert(0, f"gradients of {count}")
        for line, words in rounding.mode.misread.items():
            place = f"{words} in {line}"
            readings.append(KINDS["rounding"].reading("", 1.0, 0.0, 0.0, place=place))
        bad = _first_not_finite(self.first.gradients)
        if bad:
            readings.append(self._not_finite(bad))
        else:
            readings += rounding.readings()
        return readings

    def _not_finite(self, name: str) -> Reading:
        """Return a reading of a gradient that is not finite."""
        passes = replace(self.alone, is_training=True)
        plain = passes.run(passes.plain(self.whole), Shadow())
        exact = plain.shadows.get(name, plain.gradients.get(name))
        wide = "float32's are"
        if exact is None or not is_finite(exact):
            wide = "nor are float32's, so look at weights, data and loss"
        number = int((~self.first.gradients[name].isfinite()).sum())
        made = self.measured.not_finite if self.measured is not None else ""
        place = f" First in the step: {made}." if made else ""
        return KINDS["nonfinite-gradient"].reading(name, number, 0, wide=wide, place=place)

    def structure(self, *, draws: bool) -> list[Reading]:
        """Return the readings of gradients that are missing, or differ from the plain loss's.

        Args:
            draws: whether the step draws random numbers in this mode, too.
        """
        plain = self.alone.run(self.alone.plain(self.whole), Shadow())
        self.value = float(plain.loss.detach())
        if draws and not self._repeats(plain, seed=1):
            words = "evaluation mode draws random numbers too"
            self.unseen["the structure of the gradient"] = words
            return []
        if not is_finite(plain.loss) and not _first_not_finite(self.step.gradients):
            return [*KINDS["nonfinite-step"].of(["the loss"])]
        self.exact = {n: plain.shadows.get(n, g) for n, g in plain.gradients.items()}
        self._set_bounds(plain)
        readings = []
        near = []
        gone = []
        zero = []
        has_slope = False
        is_finite_step = True
        for name in reversed(list(self.alone.leaves)):  # in the order of backward
            g = self.step.gradients.get(name)
            r = self.exact.get(name)
            # Such as a bias that cancels, up to roundings.
            is_zero = r is None or float(r.norm()) <= KINDS["gradient"].bound * self.scales[name]
            has_slope = has_slope or not is_zero
            if name in self.differing:
                readings.append(KINDS["not-reduced"].reading(name, self.differing[name], 0))
            elif g is None or not bool(g.any()):
                if not is_zero:
                    gone.append(name)
                elif g is None and self._is_of_the_model(name):
                    zero.append(name)
            elif not is_finite(g):
                is_finite_step = False
            elif r is None:
                words = "is not zero, and the plain loss does not depend on it."
                readings.append(KINDS["gradient"].reading(name, 1.0, 0.0, words=words))
            else:
                result = self._judge(name, self.step.shadows.get(name, g).to(r.device), r)
                if isinstance(result, Reading):
                    readings.append(result)
                else:
                    near.append(result)
        if readings and not self._repeats(plain):
            self.unseen["the structure of the gradient"] = "two passes of the loss differ"
            return []
        count = len(self.alone.leaves)
        if not (has_slope or near or readings) and is_finite_step:
            readings.append(KINDS["zero-gradients"].reading("", 1, 0, 0))
            zero = []
        words = "; float32's are not zero"
        readings += KINDS["no-gradient"].of(gone, count=count, words=words)
        words = ", nor in the plain loss: no graph leads from the loss to them"
        readings += KINDS["no-gradient"].of(zero, count=count, words=words)
        self._add_lines(near, plain)
        readings.sort(key=lambda r: r.expected != 1.0)  # factors, which join none of the others
        return joined(readings, count)

    def _is_of_the_model(self, name: str) -> bool:
        return any(inner_name(n) == name for n, _ in self.alone.model.named_parameters())

    def _repeats(self, plain: Pass, seed: int | None = None) -> bool:
        """Return whether another plain pass, perhaps with other draws, gives the same gradients."""

        def repeated() -> Tensor:
            if seed is not None:
                torch.manual_seed(seed)
                random.seed(seed)
            return self.alone.plain(self.whole)()

        again = self.alone.run(repeated, Shadow())
        return all(torch.equal(x, again.gradients[n]) for n, x in plain.gradients.items())

    def _set_bounds(self, plain: Pass) -> None:
        """Allow for roundings where a gradient has no shadow, or where choices follow the step's."""
        assert self.measured is not None
        self.scales = lengths(self.exact)
        own = distances(plain.gradients, self.exact)[1]
        modes = [m for m in (self.measured.mode, self.step.mode, plain.mode) if m is not None]
        chooses = any(m.indices.total() for m in (self.measured.mode, plain.mode))
        stops = any(m.stops for m in modes)
        working = max(self.measured.mode.working, plain.mode.working)
        self.bounds = {}
        for name in self.exact:
            bound = KINDS["gradient"].bound
            allowed = MARGIN * (own[name] + self.measured.each.get(name, 0.0) + 2.0**-24)
            if name not in plain.shadows or (self.follows and name not in self.step.shadows):
                bound = max(bound, allowed, COARSE * working)
            elif chooses or not self.follows:
                bound = max(bound, allowed)
            if stops:
                bound = max(bound, STOPPED)
            self.bounds[name] = min(bound, 1.0)

    def terms(self) -> list[Gradients]:
        """Return the plain gradients of each micro-batch, if there are several and not too many."""
        if self._terms is None:
            self._terms = []
            for part in self.alone.parts if 1 < len(self.alone.parts) <= MOST_TERMS else []:
                term = self.alone.run(self.alone.plain(part), Shadow())
                gradients = {}
                for name, r in self.exact.items():
                    g = term.gradients.get(name, torch.zeros_like(r))
                    gradients[name] = term.shadows.get(name, g)
                self._terms.append(gradients)
        return self._terms

    def _judge(self, name: str, x: Tensor, r: Tensor) -> Reading | float:
        """Return a reading of a gradient, or its relative distance from the exact one if that is
        within the bound.
        """
        bound = self.bounds[name]
        scale = self.scales[name]
        multiple = fit(r, x)
        factor = multiple.factor
        distance = multiple.distance / scale
        if distance <= bound:
            return distance
        if factor and multiple.rest <= bound * abs(factor) * scale:
            num_parts = len(self.alone.parts) // self.num_ranks
            equals = equal_to(factor, num_parts, self.num_ranks)
            kind = KINDS["gradient"]
            if ", which is 2^" in equals and factor >= 256 and self.step.loss_scale == 1.0:
                equals += ". If the step divides by a loss scale of its own, all is well"
                kind = replace(kind, severity="note")
            words = f"is {factor:.6g} times float32's in one process{equals}."
            return kind.reading(name, factor, 1.0, bound, words=words)
        more = ""
        if factor and self.terms():
            columns = torch.stack([term[name].flatten() for term in self.terms()], 1)
            right, misfit = _fit(columns, r)
            weights, rest = _fit(columns, x)
            if misfit > bound:
                # Such as a balance loss, pairs within a batch, or scales of a whole tensor: the sum
                # of the parts is another function than the whole.
                self.is_sum = False
                mean = columns.mean(1).view_as(r)
                distance = float((x - mean).norm()) / scale
                bound = max(bound, MARGIN * misfit)
                if distance <= bound or rest <= bound:
                    return min(distance, bound)
            fits = len(x.flatten()) >= 4 * len(weights) and rest <= 2 * bound
            if fits and min(map(abs, right)) >= 1e-6:
                ratios = torch.tensor(weights) / torch.tensor(right)
                times = ", ".join(f"{round(ratio, 4) + 0.0:.3g}" for ratio in ratios.tolist())
                more = f" Micro-batches count {times} times, rank after rank."
        words = f"differs by {distance:.2g} of its length from float32's in one process; {bound:.1g} is allowed.{more}"
        return KINDS["gradient"].reading(name, distance, 0.0, bound, words=words)

    def _add_lines(self, near: list[float], plain: Pass) -> None:
        if not self.is_sum:
            words = "the loss over all of them is no weighted sum of their losses"
            self.unseen["the weights of micro-batches"] = words
        lost = (
            [n for n in self.step.gradients if n not in self.step.shadows] if self.follows else []
        )
        if lost:
            cuts = self.step.mode.cuts | plain.mode.cuts
            through = f" through {', '.join(cuts)}" if cuts else ""
            self.lines.append(f"  not followed{through}: {counted(len(lost), 'gradient')}")
        if plain.mode.indices.total():
            (site, name), number = plain.mode.indices.most_common(1)[0]
            self.lines.append(
                f"  {number} indices of {name} in {site} are others in float32, so bounds are wider"
            )
        if near:
            without = "with" if lost else "without"
            self.lines.append(
                f"  {without} their roundings {counted(len(near), 'tensor')} within {max(near):.1g} "
                "of float32's in one process"
            )
        if self.step is not self.first:
            mode = "structure compared in evaluation mode, since training draws random numbers"
            self.lines.append(f"  {mode}")
            if self.alone.backward is not None:
                self.unseen["backward= in training mode"] = "training draws random numbers"


def _fit(columns: Tensor, target: Tensor) -> tuple[list[float], float]:
    """Return the weights of columns by least squares, and the relative length that they do not
    explain.
    """
    columns = columns.cpu()
    target = target.flatten().cpu()
    weights = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    residual = float((target - columns @ weights).norm())
    return weights.tolist(), residual / (float(target.norm()) or 1.0)


def _first_not_finite(gradients: Mapping[str, Tensor]) -> str:
    """Return the first gradient in backward that is not finite; empty without one."""
    for name in reversed(list(gradients)):
        if not is_finite(gradients[name]):
            return name
    return ""


def _differing_ranks(gradients: Gradients, ranks: Ranks) -> dict[str, int]:
    """Return the number of ranks whose gradient has other bits than rank 0's, by tensor, without
    equal tensors.
    """
    fingerprints = {name: fingerprint(gradient) for name, gradient in gradients.items()}
    first, *other_ranks = ranks.gather(fingerprints)
    counts = Counter[str]()
    for prints in other_ranks:
        counts.update(name for name, bits in first.items() if prints.get(name) != bits)
    return counts


def weights_of_ranks(model: nn.Module, ranks: Ranks) -> list[dict[str, int]]:
    """Return a hash of a sample of each weight by name, of each rank; none where parameters are
    sharded as DTensors. All ranks make the call.
    """
    weights = {}
    if ranks.size > 1 and not any(map(is_sharded, model.parameters())):
        for name, p in model.named_parameters():
            weights[inner_name(name)] = fingerprint(evenly_spread(p))
    return ranks.gather(weights)


def vocabulary_of(model: nn.Module) -> int:
    """Return the outputs of the last linear layer with as many as an embedding has rows, the
    logits; 0 without one.

    Example:
        >>> vocabulary_of(nn.Sequential(nn.Embedding(65, 8), nn.Embedding(256, 8), nn.Linear(8, 65)))  # 256 positions
        65
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Linear):
        return head.out_features
    modules = list(model.modules())
    sizes = {m.num_embeddings for m in modules if isinstance(m, nn.Embedding)}
    for m in reversed(modules):
        size = m.out_features if isinstance(m, nn.Linear) else 0
        if size in sizes and size >= LEAST_VOCABULARY:  # two token types are no vocabulary
            return size
    return 0


def has_own_batches(model: nn.Module) -> bool:
    """Return whether each rank trains on its own batch.

    Ranks that share a layer by tensor parallelism may share one.
    """
    is_fsdp = any(type(m).__name__.startswith("FSDP") for m in model.modules())
    return is_fsdp or not any(map(is_sharded, model.parameters()))


def _equal_batches(model: nn.Module, of_ranks: Sequence[Any]) -> Iterator[Reading]:
    hashes = []
    for parts in of_ranks:
        hashes.append(list(map(fingerprint, tensors_in(parts))))
    is_equal = bool(hashes[0]) and hashes.count(hashes[0]) == len(hashes) > 1
    if is_equal and has_own_batches(model):
        words = "hold the same batch: give each rank its share of the data (DistributedSampler)"
        yield KINDS["equal-ranks"].reading("", len(hashes), 1, words=words)


def coarse_loss(loss: Any) -> list[str]:
    """Return a line about a loss computed in 16 bits: it is read off by up to half an ulp.

    Example:
        >>> coarse_loss(torch.tensor(3.0, dtype=torch.bfloat16))
        ['loss in bfloat16: near 3 its values lie 0.0156 apart; take the loss of logits.float()']
    """
    if not isinstance(loss, Tensor) or loss.dtype not in NARROW or not loss.isfinite():
        return []
    exponent = math.floor(math.log2(max(abs(float(loss)), 2.0**-14)))
    spacing = torch.finfo(loss.dtype).eps * 2.0**exponent
    return [
        f"loss in {dtype_name(loss.dtype)}: near {float(loss):.3g} its values lie {spacing:.3g} "
        "apart; take the loss of logits.float()"
    ]


def equal_to(factor: float, num_parts: int, num_ranks: int) -> str:
    """Return ``, which is NAME`` for a factor that equals a number of the set-up or a power of two.

    Example:
        >>> equal_to(4.001, 1, 4), equal_to(3.3, 1, 4), equal_to(65536, 1, 4)
        (', which is the number of ranks', '', ', which is 2^16, the loss scale that torch begins with')
    """
    counts = {"the number of ranks": num_ranks, "the number of micro-batches": num_parts}
    if min(num_parts, num_ranks) > 1:
        counts["micro-batches times ranks"] = num_parts * num_ranks
    names = []
    for name, number in counts.items():
        if number != 1 and abs(factor / number - 1) < _NEAR:
            names.append(name)
        if number != 1 and abs(factor * number - 1) < _NEAR:
            names.append(f"1 / {name}")
    power = round(math.log2(abs(factor)))
    if not names and power and abs(factor / 2.0**power - 1) < _NEAR:
        torchs = ", the loss scale that torch begins with" if power == 16 else ""
        names.append(f"2^{power}{torchs}")
    if names:
        return f", which is {' and '.join(names)}"
    return ""
