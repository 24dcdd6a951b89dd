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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.findings import Findings
from narrowgauge.checks.float32_copy import gathered_copy
from narrowgauge.checks.loss_value import coarse_loss
from narrowgauge.checks.passes import OneProcess, Pass, Passes
from narrowgauge.checks.rounding import rounding_of
from narrowgauge.checks.set_up import inner_name
from narrowgauge.checks.shadow import Shadow
from narrowgauge.checks.sites import tensors_in
from narrowgauge.checks.step_samples import evenly_spread
from narrowgauge.checks.structure import Comparison
from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.distributed.replica_verification import possible_parts
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.torch_support.torch_hooks import has_own_hooks
from narrowgauge.torch_support.torch_names import unwrapped_model


def compare_gradients(passes: Passes) -> Findings:
    """Compare the gradients of one configured step with their shadow, with the plain loss, and with
    the slope of the loss.

    All ranks make the call.
    """
    model = passes.model
    ranks = all_ranks()
    reason = _why_none(model)
    if reason:
        return Findings(unseen={"the gradient": reason})
    has_shards = any(map(is_sharded, model.parameters()))
    follows = ranks.size == 1 and not has_shards
    rounding = None
    if follows:
        first, rounding = rounding_of(passes, passes.step)
    else:
        first = passes.run(passes.step)
    if passes.stepped:
        return Findings([*_step_in_backward(passes)])
    passes.forget_weights()
    passes, step, draws = _without_draws(passes, first, follows)
    differing = differing_ranks(step.gradients, ranks)
    reason = _why_no_whole_model(model, differing)
    if reason:
        return Findings(unseen={"the gradient": reason})
    of_ranks = ranks.gather(passes.parts)
    alone = _alone(passes, [*chain.from_iterable(of_ranks)], has_shards, follows)

    def compare() -> Findings:
        comparison = Comparison(alone, first, step, rounding, differing, ranks.size)
        comparison.findings.readings += equal_batches(model, of_ranks)
        one: Any = nullcontext()
        if not follows:
            one = OneProcess()  # type: ignore[no-untyped-call]
        with one:
            comparison.compare(draws=draws)
        return comparison.findings

    findings = ranks.of_first(compare)
    findings.gradients = first.gradients
    findings.readings += KINDS["missing-parameters"].of(first.unstepped)
    findings.lines += coarse_loss(first.loss)
    return findings


def _without_draws(passes: Passes, first: Pass, follows: bool) -> tuple[Passes, Pass, bool]:
    """Return the passes and the step in evaluation mode if the first step draws random numbers on
    any rank, and whether it draws there too.
    """
    ranks = all_ranks()
    if not ranks.largest(int(first.draws)):
        return passes, first, False
    passes = replace(passes, is_training=False)
    step = passes.run(passes.step, Shadow() if follows else None)
    return passes, step, bool(ranks.largest(int(step.draws)))


def _why_no_whole_model(model: nn.Module, differing: Mapping[str, int]) -> str:
    """Return which tensors ranks hold parts of; empty if each process has the whole model.

    One process would wait for the others in the model's own collectives.
    """
    if not differing:
        return ""
    in_parts = possible_parts(weights_of_ranks(model, all_ranks())).intersection(differing)
    if not in_parts:
        return ""
    return f"ranks hold parts of {of_all(sorted(in_parts))}: no process has the whole model"


def _why_none(model: nn.Module) -> str:
    """Return why the gradients of a model are not compared; empty if they are."""
    for p in model.parameters():
        if p.is_complex():
            return "complex parameters"
        if isinstance(getattr(p, "main_grad", None), Tensor):
            return "a kernel adds to main_grad, where a copy has none"
    return ""


def _step_in_backward(passes: Passes) -> Iterator[Reading]:
    """Yield a reading of tensors that a pass changed: a note where each has a hook, on purpose."""
    kind = KINDS["step-order"].case("in-backward")
    if all(has_own_hooks(passes.leaves[name]) for name in passes.stepped):
        kind = replace(kind, severity="note")
    yield from kind.of(passes.stepped)


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


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────


def differing_ranks(gradients: Mapping[str, Tensor], ranks: Ranks) -> dict[str, int]:
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


def has_own_batches(model: nn.Module) -> bool:
    """Return whether each rank trains on its own batch.

    Ranks that share a layer by tensor parallelism may share one.
    """
    is_fsdp = any(type(m).__name__.startswith("FSDP") for m in model.modules())
    return is_fsdp or not any(map(is_sharded, model.parameters()))


def equal_batches(model: nn.Module, of_ranks: Sequence[Any]) -> Iterator[Reading]:
    """Yield a reading where all ranks hold one batch."""
    hashes = []
    for parts in of_ranks:
        hashes.append(list(map(fingerprint, tensors_in(parts))))
    is_equal = bool(hashes[0]) and hashes.count(hashes[0]) == len(hashes) > 1
    if is_equal and has_own_batches(model):
        words = "hold the same batch: give each rank its share of the data (DistributedSampler)"
        yield KINDS["equal-batches"].case("ranks").reading("", len(hashes), 1, words=words)
