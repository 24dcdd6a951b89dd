"""Summing gradients across ranks by a row of ``REDUCTIONS``, for models that are sharded (FSDP2), replicated, or both.

A step has micro-batches, of which each rank computes some. :meth:`GradientReduction.micro_batch` surrounds each backward pass;
after the last, ``p.grad`` holds the sum over all micro-batches of all ranks. What FSDP2 shards is summed during the backward
pass, by a ``ReduceScatter`` of our own; replicated gradients are summed after it.

An order-invariant reduction also enforces what its promise rests on (:mod:`narrowgauge.distributed.order_invariance`). It
refuses, as they happen, forward passes that draw random numbers and gradients that are added up before they are sent. It makes
PyTorch's own clipping norm exact.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge import torch_names
from narrowgauge.distributed.exchanges import (
    EXCHANGES,
    ONE_RANK,
    Exchange,
    RankGrid,
    group_of,
    of_mesh,
    replicated,
)
from narrowgauge.distributed.order_invariance import (
    ForwardPasses,
    GradientUsage,
    is_filled,
    refuse_unsent,
    require_first,
    take_norms,
)
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.replicated import BucketSums, Replicated, SumAfterBackward
from narrowgauge.distributed.sharding import GroupSum, settle
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.numerics.dtensor import by_group, is_sharded, local_of
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.sums import REDUCTIONS, Reduction

_installed: weakref.WeakKeyDictionary[nn.Module, weakref.ref[GradientReduction]] = weakref.WeakKeyDictionary()


class Accumulator(Protocol):
    """What sums the gradients of micro-batches, such as :class:`narrowgauge.GradientAccumulator`."""

    def accumulate(self) -> None:
        """Take in ``p.grad`` and set it to ``None``."""

    def finish(self) -> None:
        """Put the sums into ``p.grad``."""

    def discard(self) -> None:
        """Forget the gradients since the last ``finish``."""


def reduce_gradients_with(
    model: nn.Module,
    name: str | Reduction,
    *,
    average: bool = True,
    accumulator: Accumulator | None = None,
    sums: Literal["sharded", "unsharded"] = "sharded",
    seed: int = 0,
    mesh: Any = None,
) -> GradientReduction:
    """Sum a model's gradients across ranks by a row of ``REDUCTIONS``, from now on.

    Args:
        model: sharded by FSDP2, with replicas (HSDP) or without; wrapped in DDP; or plain, with equal weights on all ranks.
            What FSDP2 does not shard must be equal on all ranks. Freeze parameters first.
        name: a row of ``REDUCTIONS``, or its name.
        average: divide the sum by the number of ranks, as FSDP2 and DDP do; if not, the loss of each micro-batch is its share of
            the step's.
        accumulator: sums the micro-batches of a step, in a format of its own; without one autograd and FSDP2 do. An
            order-invariant reduction sums them itself and ignores the accumulator.
        sums: ``"sharded"`` exchanges each micro-batch's gradients, then adds them up; ``"unsharded"`` adds them up on each rank
            and exchanges once, which takes the memory of a gradient of the whole model.
        seed: of random bits, where the reduction draws some; the same on all ranks.
        mesh: the ranks that a plain model is replicated on; ``None`` for all. A sharded model has its own.
    Returns:
        The reduction, whose ``micro_batch`` surrounds backward passes. A backward pass outside of it is a step of its own: an
        order-invariant reduction refuses a second one before the gradients are zeroed.
    Raises:
        RecipeError: no such row, one that cannot do what was asked, a model on several meshes, one whose gradients another
            reduction sums, or a mixed precision of FSDP2 by which one rank would sum other values than several.
    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> reduction = reduce_gradients_with(model, "float32", average=False)
        >>> for k in range(3):
        ...     with reduction.micro_batch(is_last=k == 2):
        ...         model(torch.tensor([1.0, 2.0])).backward()
        >>> model.weight.grad
        tensor([[3., 6.]])
    """
    row = REDUCTIONS.get(name) if isinstance(name, str) else name
    name = name if isinstance(name, str) else name.name
    if row is None or name not in EXCHANGES:
        known = suggestion(name, EXCHANGES) or f"There are {', '.join(EXCHANGES)}."
        raise RecipeError(f"no reduction is named '{name}'.", known)
    if sums == "unsharded" and EXCHANGES[name].sums_leaves:
        raise RecipeError(
            f"reduction '{name}' was requested with unsharded sums, which add micro-batches before they are exchanged.",
            "Leave the sums sharded.",
        )
    inner = inner_of(model)
    if (reference := _installed.get(inner)) and (other := reference()) and other.is_installed:
        raise RecipeError(
            f"reduction '{name}' was requested for a model whose gradients are summed by '{other.row.name}' already.",
            "Call close() of that one first; prepare() installs one as optimizer.reduction.",
        )
    make = partial(EXCHANGES[name], row=row, average=average, seed=seed)
    reduction = GradientReduction(model, row, make, average, accumulator, sums, mesh)
    _installed[inner] = weakref.ref(reduction)
    return reduction


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    is_last: bool = True
    is_absent: bool = False


class _GroupExchange(GroupSum):
    def __init__(self, reduction: GradientReduction, exchange: Exchange, group: Any) -> None:
        self.reduction, self.exchange, self.group = reduction, exchange, group
        self.known = torch_names.fsdp_parameters(group)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is summed; FSDP2 calls it before it adds to ``p.grad``."""
        self.reduction.before_group(self.group, self.exchange.grid.shards)
        return super().allocate(size, dtype=dtype, device=device)

    def sum(self, gradient: Tensor, output: Tensor, group: Any) -> None:
        if any(now is not then for now, then in zip(torch_names.fsdp_parameters(self.group), self.known, strict=True)):
            self.reduction.require_known()
        now = self.reduction.now if self.reduction.now is not None else _MicroBatch()
        if now.is_absent:
            gradient.zero_()
        self.exchange.take(gradient, output, is_last=now.is_last)


class GradientReduction:
    """Sums the gradients of a model across ranks; made by :func:`reduce_gradients_with`.

    Attributes:
        size: the number of ranks whose gradients are summed.
    """

    def __init__(
        self,
        model: nn.Module,
        row: Reduction,
        make: Callable[[RankGrid], Exchange],
        average: bool,
        accumulator: Accumulator | None,
        sums: str,
        mesh: Any,
    ) -> None:
        settle(model)
        self.row, self._model = row, model
        self.now: _MicroBatch | None = None
        self._sums_leaves = EXCHANGES[row.name].sums_leaves
        self._accumulator = None if self._sums_leaves else accumulator
        self._sums, self._in_step, self._is_closed = sums, False, False
        self._first_step = 0
        self._seed: int | None = None
        self._exchanges: list[Exchange] = []
        self._undo: list[Callable[[], None]] = []
        self._trainable: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]

        def register(grid: RankGrid) -> Exchange:
            exchange = make(grid)
            exchange.place, exchange.step = len(self._exchanges), self._first_step
            exchange.seed = self._seed if self._seed is not None else exchange.seed
            self._exchanges.append(exchange)
            return exchange

        self._fsdp = torch_names.fsdp_groups(model)
        sharded, grid = self._take_over_shards(register)
        others = [p for p in self._trainable if id(p) not in sharded]
        self._sharded = [p for p in self._trainable if id(p) in sharded]
        if grid is None:
            grid = _grid_of(model, mesh)
        self.size, self._group = grid.size, grid.group
        _require_whole(model, others, grid)
        whole = replicated(grid.group) if grid.size > 1 else ONE_RANK
        self._replicated = Replicated(others, whole, register, self._dtypes_of_sums() if self._sums_leaves else {})
        self._lone = SumAfterBackward(self._replicated, self._is_inside, self._check_pass)
        self._is_lone = False
        if isinstance(model, nn.parallel.DistributedDataParallel):
            buckets = BucketSums(partial(register, whole), self._is_inside, average, self._sums_leaves)
            self._undo += buckets.install(model)
        elif others and (self.size > 1 or self._sums_leaves):
            self._undo += self._lone.install()
            self._is_lone = True
        self._usage = GradientUsage(self._sharded if self._sums_leaves else (), grid.group)
        if self.size > 1 or self._sums_leaves:
            self._undo += self._usage.install(self._trainable)
        self._forwards = ForwardPasses(self._device, self._require_sent)
        if self._sums_leaves and self._trainable:
            self._undo += self._forwards.install(inner_of(model))
            take_norms(_are_summed_exactly)

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool = True, is_absent: bool = False) -> Iterator[None]:
        """Surround the backward pass of one micro-batch; all ranks have equally many in a step.

        After the last, ``p.grad`` holds the sum over all micro-batches of all ranks, divided once by the number of ranks where
        ``average``. A failure in it discards the step.

        Args:
            is_last: whether this is the step's last one.
            is_absent: this rank has no micro-batch left: it repeats one, so that all ranks take part in every exchange, and
                contributes nothing.
        Raises:
            RecipeError: gradients of an earlier step are still there, or absence where micro-batches are summed before they
                are exchanged; of an order-invariant reduction also, on all ranks, micro-batches that use different parameters of
                what FSDP2 shards, and gradients that FSDP2 was told to keep on their rank.
        """
        if self.now is not None:
            raise RuntimeError("micro_batch was entered within another")
        if self._is_closed:
            raise RuntimeError("micro_batch was entered of a reduction that is closed")
        self._begin(is_absent)
        kept = self._set_aside() if is_absent and not self._sums_leaves else {}
        self.now = now = _MicroBatch(is_last, is_absent)
        if self._sums == "unsharded":
            for module, _ in self._fsdp:
                module.set_requires_gradient_sync(is_last, recurse=False)
        try:
            yield
            self._take_in(now, kept)
            self._in_step = not is_last
        except BaseException:
            self.discard()
            raise
        finally:
            self.now = None

    def accumulate_in(self, accumulator: Accumulator) -> None:
        """Sum the micro-batches of a step in an accumulator from now on; an order-invariant reduction ignores it."""
        self._accumulator = None if self._sums_leaves else accumulator

    @property
    def step(self) -> int:
        """Optimizer steps whose gradients were summed."""
        return max((exchange.step for exchange in self._exchanges), default=self._first_step)

    def set_step(self, step: int, seed: int | None = None) -> None:
        """Set the number of optimizer steps done, and the seed, when a run resumes: the keys of random bits."""
        self._first_step = step  # of what DDP's buckets make later
        self._seed = seed if seed is not None else self._seed
        for exchange in self._exchanges:
            exchange.step = step
            exchange.seed = seed if seed is not None else exchange.seed

    @contextlib.contextmanager
    def shown_to(self, look: Callable[[Tensor], None]) -> Iterator[None]:
        """Call ``look`` with each flat gradient that this rank is about to send into a sum."""
        for exchange in self._exchanges:
            exchange.on_gradient = look
        try:
            yield
        finally:
            for exchange in self._exchanges:
                exchange.on_gradient = None

    def discard(self) -> None:
        """Forget the micro-batches since the last step, and all gradients."""
        for parameter in self._trainable:
            parameter.grad = None
        self._replicated.discard()
        self._lone.discard()
        for exchange in self._exchanges:
            exchange.discard()
        if self._accumulator is not None:
            self._accumulator.discard()
        self._in_step = False
        self._usage.discard()
        self._forwards.discard()

    def largest(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks whose gradients are summed; all of them call it."""
        values = values.clone()
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def bytes_per_param(self) -> float:
        """Bytes per parameter kept between micro-batches and steps, counted from live tensors."""
        kept = sum(exchange.num_bytes() for exchange in self._exchanges)
        return kept / max(1, sum(local_of(p).numel() for p in self._trainable))

    def sums_exactly(self, gradients: Set[int]) -> bool:
        """Return whether it sums exactly and a tensor with one of these ids is among its gradients."""
        return self._sums_leaves and self.is_installed and any(id(p.grad) in gradients for p in self._trainable)

    @property
    def is_installed(self) -> bool:
        """Return whether it takes part in backward passes: false once closed, and where one process has nothing to sum."""
        return bool(self._undo)

    def close(self) -> None:
        """Restore how gradients were summed before; DDP keeps its hook, which then sums each bucket by itself."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._is_closed = True

    def before_group(self, group: Any, shards: int) -> None:
        """Check a group of FSDP2, cut into ``shards``, whose gradients are about to be summed and added to ``p.grad``."""
        if self._sums_leaves:
            self._require_sent([group])
        if self._is_inside():
            return
        for parameter in torch_names.fsdp_parameters(group):
            self._usage.summed.discard(parameter)
            if parameter.grad is None:
                continue
            # FSDP2 differentiates another tensor, on which the hooks of the parameter are not called.
            if shards == 1 and self._is_lone:
                self._lone.set_aside(parameter)
            elif self._sums_leaves and is_filled(parameter.grad):
                self._usage.summed.add(parameter)

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Surround a forward pass that calls no module of the model, such as a compiled loss; modules are watched anyway.

        Raises:
            RecipeError: it drew random numbers, and the reduction is order-invariant.
        """
        with self._forwards.watched() if self._sums_leaves else contextlib.nullcontext():
            yield

    def _is_inside(self) -> bool:
        return self.now is not None

    def _check_pass(self, before: Iterable[Tensor]) -> None:
        """Refuse the sum of a backward pass that nothing surrounds, where it must not be taken."""
        self.require_known()
        if self._sums_leaves:
            require_first(before)

    def _device(self) -> torch.device:
        device: torch.device = self._fsdp[0][1].device if self._fsdp else self._trainable[0].device
        return device

    def _require_sent(self, groups: Sequence[Any] = ()) -> None:
        """Refuse gradients that FSDP2 was told to keep on their rank, of some of its groups or of all."""
        if any(map(torch_names.fsdp_keeps_gradients, groups or (group for _, group in self._fsdp))):
            refuse_unsent("set_requires_gradient_sync(False), or set_requires_all_reduce(False), of FSDP2")

    def _begin(self, is_absent: bool) -> None:
        if is_absent and self._sums == "unsharded" and self._fsdp:
            raise RecipeError(
                "a rank without a micro-batch was met, and unsharded sums cannot leave its repeated one out.",
                "Give all ranks equally many micro-batches, or keep the sums sharded.",
            )
        if not self._in_step and any(p.grad is not None for p in self._trainable):
            raise RecipeError(
                "a step was begun, and gradients of an earlier one are still there.",
                "Call zero_grad(set_to_none=True) after each step.",
            )
        if not self._in_step:
            self.require_known()
        self._in_step = True
        self._usage.begin_micro_batch()
        for module, group in self._fsdp if self._sums_leaves else ():
            if torch_names.fsdp_lacks_zeros(group):
                module.unshard()
                module.reshard()

    def require_known(self) -> None:
        """Refuse gradients that are not summed, or are summed as another parameter's: replicas would drift apart.

        They are those of a parameter that was frozen or missing when the reduction was installed.
        """
        known = {id(p) for p in self._trainable}
        groups = [group for _, group in torch_names.fsdp_groups(self._model)]
        gathered = {id(p) for group in groups for p in torch_names.fsdp_gathered(group)}
        sharded = [p for group in groups for p in torch_names.fsdp_parameters(group)]
        for parameter in [*self._frozen, *sharded, *self._model.parameters()]:
            if not parameter.requires_grad or id(parameter) in known or id(parameter) in gathered:
                continue
            was = "frozen" if any(parameter is p for p in self._frozen) else "not in the model"
            raise RecipeError(
                f"a parameter of shape {tuple(parameter.shape)} was {was} when reduction '{self.row.name}' was installed, and is "
                "trained now.",
                "Call close() of the reduction, and install it anew.",
            )

    def require_stepped(self) -> None:
        """Refuse a step of an optimizer none of whose parameters has a gradient, though gradients of others were summed."""
        found = next((p for p in self._trainable if p.grad is not None), None)
        if found is not None:
            raise RecipeError(
                f"gradients were summed by reduction '{self.row.name}', one of shape {tuple(found.shape)} among them, and the "
                "optimizer's parameters have none: they are not the model's.",
                "Make the optimizer of model.parameters() as they are now.",
            )

    def _set_aside(self) -> dict[Tensor, Tensor | None]:
        """Take what this rank has summed so far out of the way of a backward pass that does not count."""
        kept = {p: p.grad for p in self._replicated.parameters}
        for parameter in kept:
            parameter.grad = None
        return kept

    def _take_in(self, now: _MicroBatch, kept: dict[Tensor, Tensor | None]) -> None:
        """Add the gradients of a micro-batch; after the last, write the sums to ``p.grad``."""
        if self._sums_leaves:
            self._require_sent()
        whole = set(self._replicated.parameters)
        if any(p.grad is None and (p in whole or not now.is_last) for p in self._usage):
            raise RecipeError(
                "gradients were released as they arrived, before they were summed over ranks and micro-batches.",
                "Keep the gradients, or shard the model and give each rank one micro-batch per step.",
            )
        self._usage.end_micro_batch(is_absent=now.is_absent)
        if now.is_last:
            self._usage.end_step()
        if self._sums_leaves:
            self._replicated.add(is_absent=now.is_absent, is_last=now.is_last)
            if not now.is_last:
                for parameter in self._sharded:
                    parameter.grad = None
            return
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        if self._accumulator is not None:
            self._accumulator.accumulate()
        if now.is_last:
            if self._accumulator is not None:
                self._accumulator.finish()
            self._replicated.add()

    # ── what is installed ──────────────────────────────────────────────────────────────────────────────────────────────

    def _take_over_shards(self, register: Callable[[RankGrid], Exchange]) -> tuple[set[int], RankGrid | None]:
        """Give FSDP2's parameter groups their exchanges; return the ids of the sharded parameters, and the ranks."""
        found: set[int] = set()
        ranks: dict[tuple[int, ...], RankGrid] = {}
        for module, group in self._fsdp:
            where = torch_names.fsdp_mesh(group)
            if where.shard_dim is None or where.mesh.ndim != (1 if where.replicate_dim is None else 2):
                raise RecipeError(
                    f"FSDP2 shards {type(module).__name__} over a mesh of {where.mesh.ndim} dims; not all sum gradients.",
                    "Shard over a mesh of one dim, or of two: replicas and shards.",
                )
            grid = of_mesh(where.mesh, where.shard_dim, where.replicate_dim)
            ranks[tuple(dist.get_process_group_ranks(grid.group))] = grid
            comm = _GroupExchange(self, register(grid), group)
            alone = group_of([all_ranks().rank]) if grid.replicas > 1 else None
            self._undo.append(torch_names.take_over_sums(module, group, comm, alone))
            if grid.shards > 1:  # FSDP2 sums nothing over one shard: those are replicated
                found |= {id(p) for p in torch_names.fsdp_parameters(group)}
        if len(ranks) > 1:
            raise RecipeError(f"a model is sharded over {len(ranks)} meshes of other ranks.", "Shard it over one.")
        return found, next(iter(ranks.values()), None)

    def _dtypes_of_sums(self) -> dict[Tensor, torch.dtype]:
        """Return the dtypes in which FSDP2's mixed precision sums gradients, the same for a group on one rank as on several."""
        dtypes: dict[Tensor, torch.dtype] = {}
        for module, group in self._fsdp:
            for parameter in torch_names.fsdp_parameters(group):
                dtype = torch_names.fsdp_sum_dtype(group, parameter)
                if dtype is None:
                    given, own = torch_names.fsdp_policy(group, parameter), dtype_name(parameter.dtype)
                    raise RecipeError(
                        f"{given} was given for {type(module).__name__}, whose parameters are {own}: FSDP2 rounds gradients to "
                        "that before they are summed, on one rank, and after it on several.",
                        "Take a param_dtype and a reduce_dtype that the parameters' own dtype holds.",
                    )
                dtypes[parameter] = dtype
        return dtypes


def inner_of(model: nn.Module) -> nn.Module:
    inner: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return inner


def _are_summed_exactly(gradients: Iterable[Tensor]) -> bool:
    asked = {id(gradient) for gradient in gradients}
    reductions = [reduction for reference in _installed.values() if (reduction := reference()) is not None]
    return any(reduction.sums_exactly(asked) for reduction in reductions)


def _require_whole(model: nn.Module, others: Sequence[Tensor], grid: RankGrid) -> None:
    """Refuse a parameter of which the ranks that would add up its gradients hold different elements."""
    for groups, members in by_group(others):
        ranks = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
        if len(ranks.intersection(dist.get_process_group_ranks(grid.group)) if grid.group is not None else ()) > 1:
            name = next(name for name, parameter in model.named_parameters() if parameter is members[0])
            raise RecipeError(
                f"parameter '{name}' is a DTensor of which each rank holds a part, and it is not FSDP2 that gathers it.",
                "Shard it with fully_shard, or keep it whole on every rank.",
            )


def _grid_of(model: nn.Module, mesh: Any) -> RankGrid:
    sharded = next(filter(is_sharded, model.parameters()), None)
    if sharded is not None:
        raise RecipeError(
            f"a parameter of shape {tuple(sharded.shape)} is a DTensor that FSDP2 did not make.",
            "Shard with fully_shard.",
        )
    if mesh is not None:
        return replicated(group_of(mesh.mesh.flatten().tolist()))
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return replicated(model.process_group)
    return replicated()
