"""The ranks of a watched loop: their weights, batches, dropout masks, losses and gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from narrowgauge.analysis.reading import of_all, words_of
from narrowgauge.analysis.snapshot import Snapshot, is_sampled
from narrowgauge.checks.gradients import has_own_batches, weights_of_ranks
from narrowgauge.distributed.replica_verification import possible_parts, unlike
from narrowgauge.gauges.hub import Listener
from narrowgauge.gauges.recording.twin import on_host
from narrowgauge.numerics.dtensor import gradient_of, is_sharded
from narrowgauge.numerics.hashing import fingerprint_all
from narrowgauge.torch_support.torch_hooks import members_of

if TYPE_CHECKING:
    from narrowgauge.gauges.recording.watch import Watch


class OfRanks(Listener):
    """Compare the ranks of a loop; each of them has one, and all make all calls."""

    title = "the watch of ranks"

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._here = watch.hub.here
        # Of the smallest tensor's gradients on this rank, before their sum, with their step.
        self._square: tuple[int, Tensor | float] = -1, 0.0
        self._hashes: tuple[str, str] | None = None
        self._split = possible_parts(self._sums(self._weights()))
        watch.unseen["losses of ranks"] = "watch.step(loss) was not called"
        if watch.is_sharded:
            watch.unseen["weights of ranks"] = "parameters are sharded"
        if watch.backward.probe is not None:
            watch.hub.follow_gradients(self, self._add_square, watch.undo, watch.backward.probe)

    def _weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._watch.trained.items()}

    def _sums(self, tensors: Mapping[str, Tensor]) -> list[dict[str, float]]:
        """Return the sum of each tensor's elements on each rank; none for shards."""
        if self._watch.is_sharded:
            return []
        sums = on_host([x.sum(dtype=torch.float64) for x in tensors.values()])
        # NaN is not equal to itself, and 0 stands for both.
        numbers = [math.inf if x != x else x for x in sums]
        return self._here.gather(dict(zip(tensors, numbers, strict=True)))

    def _add_square(self, gradient: Tensor) -> None:
        step = self._watch.now.step
        if is_sampled(step):
            before, square = self._square
            if before != step:
                square = 0.0
            self._square = step, gradient.float().square().sum() + square

    def before_pass(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Hash the first batch of the second step, and the generator."""
        if self._watch.now.step != 2 or self._hashes is not None:
            return
        batch = {}
        for place, x in enumerate(tree_leaves(inputs)):
            if isinstance(x, Tensor) and x.element_size() <= 8:
                batch[str(place)] = x
        self._hashes = (
            fingerprint_all(batch) if batch else "",
            self._watch.now.generator if self._watch.forward.drops_out() else "",
        )

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Sum the norms of shards in sampled steps, and look for parts in the first."""
        now = self._watch.now
        if self._watch.is_sharded and is_sampled(now.step):
            try:
                now.whole_norm = _whole_norm(optimizer)
            except Exception as error:  # shards of several meshes, on all ranks
                self._watch.unseen["norms of shards"] = words_of(error)
        if self._split and optimizer is self._watch.optimizers[0] and now.step == 1:
            self._find_parts(self._watch.gradients(optimizer))

    def _find_parts(self, gradients: Mapping[str, Tensor]) -> None:
        """Find which of the tensors that differ between ranks are parts of one.

        Gradients of parts differ. Equal ones are sums, and the weights were not sent.
        """
        parts = {name: x for name, x in gradients.items() if name in self._split and x.any()}
        of_ranks = self._sums(parts)
        self._split -= set[str]().union(*of_ranks) - unlike(of_ranks)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the weights in sampled steps, and the batches in the second."""
        now = self._watch.now
        if optimizer is not self._watch.optimizers[-1]:
            return
        if is_sampled(now.step):
            now.ranks_apart = self._ranks_apart()
        if now.step == 2:
            now.alike = self._alike()

    def compare_losses(self, loss: float, step: int) -> Snapshot:
        """Compare the losses and the gradients of the ranks after a sampled step."""
        norm = math.nan if self._watch.backward.probe is None else math.sqrt(float(self._square[1]))
        losses, norms = zip(*self._here.gather((loss, norm)), strict=True)
        for name, values in (("rank_loss", losses), ("rank_grad_norm", norms)):
            # Sharded gradients are not measured before their sum.
            if not any(map(math.isnan, values)):
                self._watch.measured[f"{name}/min"] = min(values)
                self._watch.measured[f"{name}/max"] = max(values)
        now = Snapshot(step, rank_losses=list(losses))
        if len({*losses}) == len({*norms}) == 1 and 0 < norm < math.inf and self._has_own_data():
            now.alike = "batch"
        return now

    def _ranks_apart(self) -> dict[str, list[float]]:
        """Compare the weights of the ranks. Those that differed before the first step are parts."""
        of_ranks = self._sums(self._weights())
        differing = unlike(of_ranks) - self._split
        apart = {}
        for name in self._watch.trained:
            if name in differing:
                sums = [row.get(name, math.nan) for row in of_ranks]
                odd = next(rank for rank, x in enumerate(sums) if x != sums[0])
                apart[name] = [sums[0], sums[odd], odd]
        return apart

    def _alike(self) -> str:
        """Return what the ranks compute alike, where each trains on its own data."""
        batches, states = zip(*self._here.gather(self._hashes or ("", "")), strict=True)
        alike = ""
        if len({*batches}) == 1 and batches[0]:
            alike = "batch"
        elif len({*states}) == 1 and states[0]:
            alike = "masks"
        return alike if alike and self._has_own_data() else ""

    def _has_own_data(self) -> bool:
        """Return whether each rank should train on its own batch. All ranks make the call."""
        model = self._watch.watched_model
        reason = ""
        if not has_own_batches(model):
            reason = "parameters are sharded, not by FSDP"
        elif parts := unlike(weights_of_ranks(model, self._here)):
            reason = f"ranks hold other values of {of_all(sorted(parts))}"
        if reason:
            self._watch.unseen["batches of ranks"] = reason
        return not reason


def _whole_norm(optimizer: torch.optim.Optimizer) -> float:
    """Return the norm of the gradients of all ranks' shards together."""
    gradients = [gradient_of(p) for p in members_of(optimizer)]
    norm: Any = torch.nn.utils.get_total_norm([x for x in gradients if x is not None])
    whole = norm.full_tensor() if is_sharded(norm) else norm
    # Of torch.amp.GradScaler, for fused optimizers.
    return float(whole) / float(getattr(optimizer, "grad_scale", None) or 1.0)
