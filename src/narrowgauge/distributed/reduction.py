"""Sum gradients across ranks by a row of ``REDUCTIONS``, for sharded (FSDP2) and replicated models, or both.

Each rank computes some micro-batches of a step. :meth:`GradientReduction.micro_batch` surrounds each backward pass. After the
last one, ``p.grad`` holds the sum over all micro-batches of all ranks. Our own ``ReduceScatter`` sums FSDP2's shards during the
backward pass. Replicated gradients are summed after it.

An order-invariant reduction also enforces its conditions (:mod:`narrowgauge.distributed.order_invariance`). It refuses forward
passes that draw random numbers, and gradients that are added up before they are sent. It makes PyTorch's clipping norm exact.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from narrowgauge.distributed.replicated import BucketSums, Replicated
from narrowgauge.distributed.sharding import GroupSum, settle
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.numerics.dtensor import by_group, is_sharded, local_of
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.sums import REDUCTIONS, Reduction

_installed: weakref.WeakKeyDictionary[nn.Module, weakref.ref[GradientReduction]] = weakref.WeakKeyDictionary()


def reduce_gradients_with(
    model: nn.Module,
    name: str | Reduction,
    *,
    average: bool = True,
    seed: int = 0,
    mesh: Any = None,
) -> GradientReduction:
    """Sum a model's gradients across ranks by a row of ``REDUCTIONS``, from now on.

    Args:
        model: sharded by FSDP2, with or without replicas (HSDP); wrapped in DDP; or plain, with equal weights on all ranks.
            Parameters outside FSDP2 must be equal on all ranks. Freeze parameters first.
        name: a row of ``REDUCTIONS``, or its name.
        average: divide the sum by the number of ranks, as FSDP2 and DDP do. If false, scale each micro-batch's loss to its part
            of the step's loss.
        seed: of random bits, for stochastic reductions; the same on all ranks.
        mesh: the ranks that a plain model is replicated on; ``None`` for all. A sharded model has its own.
    Returns:
        The reduction. Surround backward passes with its ``micro_batch``. Outside of it, each pass is a separate step. This
        works where FSDP2 or DDP sums all gradients, and is refused for whole parameters on several ranks without DDP. An
        order-invariant reduction refuses a second pass before the gradients are zeroed.
    Raises:
        RecipeError: an unknown or unsuitable row, a model on several meshes, a model with another reduction, or a mixed
            precision of FSDP2 with which one rank would sum different values than several ranks.
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
    inner = inner_of(model)
    if (reference := _installed.get(inner)) and (other := reference()) and other.is_installed:
        raise RecipeError(
            f"reduction '{name}' was requested for a model whose gradients are summed by '{other.row.name}' already.",
            "Call close() of that one first; prepare() installs one as optimizer.reduction.",
        )
    make = partial(EXCHANGES[name], row=row, average=average, seed=seed)
    reduction = GradientReduction(model, row, make, average, mesh)
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
        """Allocate memory for the sum. FSDP2 calls this before it adds to ``p.grad``."""
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
    """Sum the gradients of a model across ranks; made by :func:`reduce_gradients_with`.

    Attributes:
        size: the number of ranks that sum gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        row: Reduction,
        make: Callable[[RankGrid], Exchange],
        average: bool,
        mesh: Any,
    ) -> None:
        settle(model)
        self.row, self._model = row, model
        self.now: _MicroBatch | None = None
        self._sums_leaves = EXCHANGES[row.name].sums_leaves
        self._accumulator: Any = None
        self._in_step, self._is_closed = False, False
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
        if isinstance(model, nn.parallel.DistributedDataParallel):
            buckets = BucketSums(partial(register, whole), self._is_inside, average, self._sums_leaves)
            self._undo += buckets.install(model)
        elif others and (self.size > 1 or self._sums_leaves):
            self._undo += [p.register_hook(partial(self._check_lone, p)).remove for p in others]
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
        """Surround the backward pass of one micro-batch. All ranks have the same number of micro-batches in a step.

        After the last one, ``p.grad`` holds the sum over all micro-batches of all ranks. With ``average`` the sum is divided
        once by the number of ranks. An error inside discards the step.

        Args:
            is_last: this is the step's last micro-batch.
            is_absent: this rank has no micro-batch left. It repeats one, so that it takes part in every exchange, and
                contributes nothing.
        Raises:
            RecipeError: gradients of an earlier step are still there. With an order-invariant reduction, on all ranks:
                micro-batches use different parameters of FSDP2's shards, or FSDP2 was set to keep gradients on their rank.
        """
        if self.now is not None:
            raise RuntimeError("micro_batch was entered within another")
        if self._is_closed:
            raise RuntimeError("micro_batch was entered of a reduction that is closed")
        self._begin()
        kept = self._set_aside() if is_absent and not self._sums_leaves else {}
        self.now = now = _MicroBatch(is_last, is_absent)
        try:
            yield
            self._take_in(now, kept)
            self._in_step = not is_last
        except BaseException:
            self.discard()
            raise
        finally:
            self.now = None

    def accumulate_in(self, accumulator: Any) -> None:
        """Sum the micro-batches of a step in a :class:`narrowgauge.GradientAccumulator` instead of by autograd.

        An order-invariant reduction sums them itself and ignores the accumulator.
        """
        self._accumulator = None if self._sums_leaves else accumulator

    @property
    def step(self) -> int:
        """Return the number of optimizer steps whose gradients were summed."""
        return max((exchange.step for exchange in self._exchanges), default=self._first_step)

    def set_step(self, step: int, seed: int | None = None) -> None:
        """Set the optimizer steps done, and the seed, when a run resumes. They key random bits."""
        self._first_step = step  # for exchanges that DDP's buckets make later
        self._seed = seed if seed is not None else self._seed
        for exchange in self._exchanges:
            exchange.step = step
            exchange.seed = seed if seed is not None else exchange.seed

    @contextlib.contextmanager
    def shown_to(self, look: Callable[[Tensor], None]) -> Iterator[None]:
        """Call ``look`` with each flat gradient before this rank sends it."""
        for exchange in self._exchanges:
            exchange.on_gradient = look
        try:
            yield
        finally:
            for exchange in self._exchanges:
                exchange.on_gradient = None

    def discard(self) -> None:
        """Forget all gradients, and the micro-batches since the last step."""
        for parameter in self._trainable:
            parameter.grad = None
        self._replicated.discard()
        for exchange in self._exchanges:
            exchange.discard()
        if self._accumulator is not None:
            self._accumulator.discard()
        self._in_step = False
        self._usage.discard()
        self._forwards.discard()

    def largest(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks that sum gradients. All of them call it."""
        values = values.clone()
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def bytes_per_param(self) -> float:
        """Return the bytes per parameter kept between micro-batches and steps, counted from live tensors."""
        kept = sum(exchange.num_bytes() for exchange in self._exchanges)
        return kept / max(1, sum(local_of(p).numel() for p in self._trainable))

    def sums_exactly(self, gradients: Set[int]) -> bool:
        """Return whether the sums are exact and include a gradient with one of these ids."""
        return self._sums_leaves and self.is_installed and any(id(p.grad) in gradients for p in self._trainable)

    @property
    def is_installed(self) -> bool:
        """Return whether it takes part in backward passes. False after ``close``, or if one process has nothing to sum."""
        return bool(self._undo)

    def close(self) -> None:
        """Restore the earlier way of summing gradients. DDP keeps our hook, which then sums each bucket alone."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._is_closed = True

    def before_group(self, group: Any, shards: int) -> None:
        """Check an FSDP2 group of ``shards`` shards before its gradients are summed and added to ``p.grad``."""
        if self._sums_leaves:
            self._require_sent([group])
        if self._is_inside():
            return
        for parameter in torch_names.fsdp_parameters(group):
            # FSDP2 differentiates another tensor, so the hooks of the parameter are not called.
            if shards == 1 and self.size > 1:
                _refuse_lone(parameter)
            self._usage.summed.discard(parameter)
            if self._sums_leaves and parameter.grad is not None and is_filled(parameter.grad):
                self._usage.summed.add(parameter)

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Surround a forward pass that calls no module of the model, such as a compiled loss. Modules are watched anyway.

        Raises:
            RecipeError: the pass drew random numbers, and the reduction is order-invariant.
        """
        with self._forwards.watched() if self._sums_leaves else contextlib.nullcontext():
            yield

    def _is_inside(self) -> bool:
        return self.now is not None

    def _check_lone(self, parameter: Tensor, _: Tensor) -> None:
        """Refuse a backward pass outside of ``micro_batch`` for a parameter that is whole on every rank."""
        if not self._is_inside():
            if self.size > 1:
                _refuse_lone(parameter)
            require_first([] if parameter.grad is None else [parameter.grad])

    def _device(self) -> torch.device:
        device: torch.device = self._fsdp[0][1].device if self._fsdp else self._trainable[0].device
        return device

    def _require_sent(self, groups: Sequence[Any] = ()) -> None:
        """Refuse if FSDP2 was set to keep gradients on their rank, in these groups or in all."""
        if any(map(torch_names.fsdp_keeps_gradients, groups or (group for _, group in self._fsdp))):
            refuse_unsent("set_requires_gradient_sync(False), or set_requires_all_reduce(False), of FSDP2")

    def _begin(self) -> None:
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
        """Refuse gradients that are not summed, or are summed as another parameter's: replicas would diverge.

        This concerns a parameter that was frozen or missing when the reduction was installed.
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
        """Refuse an optimizer step if other parameters have summed gradients, but none of the optimizer's do."""
        leftover = next((p for p in self._trainable if p.grad is not None), None)
        if leftover is not None:
            raise RecipeError(
                f"gradients were summed by reduction '{self.row.name}', one of shape {tuple(leftover.shape)} among them, and the "
                "optimizer's parameters have none: they are not the model's.",
                "Make the optimizer of model.parameters() as they are now.",
            )

    def _set_aside(self) -> dict[Tensor, Tensor | None]:
        """Detach this rank's sums so far, so that an absent micro-batch does not change them."""
        kept = {p: p.grad for p in self._replicated.parameters}
        for parameter in kept:
            parameter.grad = None
        return kept

    def _take_in(self, now: _MicroBatch, kept: dict[Tensor, Tensor | None]) -> None:
        """Add the gradients of a micro-batch. After the last one, write the sums to ``p.grad``."""
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
        """Give FSDP2's parameter groups their exchanges. Return the ids of the sharded parameters, and the ranks."""
        sharded: set[int] = set()
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
            if grid.shards > 1:  # with one shard FSDP2 sums nothing: treat as replicated
                sharded |= {id(p) for p in torch_names.fsdp_parameters(group)}
        if len(ranks) > 1:
            raise RecipeError(f"a model is sharded over {len(ranks)} meshes of other ranks.", "Shard it over one.")
        return sharded, next(iter(ranks.values()), None)

    def _dtypes_of_sums(self) -> dict[Tensor, torch.dtype]:
        """Return the dtypes in which FSDP2's mixed precision sums gradients: the same on one rank as on several."""
        dtypes: dict[Tensor, torch.dtype] = {}
        for module, group in self._fsdp:
            for parameter in torch_names.fsdp_parameters(group):
                dtype = torch_names.fsdp_sum_dtype(group, parameter)
                if dtype is None:
                    policy, own_dtype = torch_names.fsdp_policy(group, parameter), dtype_name(parameter.dtype)
                    raise RecipeError(
                        f"{policy} was given for {type(module).__name__}, whose parameters are {own_dtype}: FSDP2 rounds "
                        "gradients to that before they are summed, on one rank, and after it on several.",
                        "Take a param_dtype and a reduce_dtype that the parameters' own dtype holds.",
                    )
                dtypes[parameter] = dtype
        return dtypes


def inner_of(model: nn.Module) -> nn.Module:
    inner: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return inner


def _refuse_lone(parameter: Tensor) -> None:
    raise RecipeError(
        f"a backward pass outside of micro_batch() reached a parameter of shape {tuple(parameter.shape)}, which is whole on "
        "every rank: its gradient would stay on its rank.",
        "Surround the pass with micro_batch() of the reduction, or wrap the model in DistributedDataParallel.",
    )


def _are_summed_exactly(gradients: Iterable[Tensor]) -> bool:
    asked = {id(gradient) for gradient in gradients}
    reductions = [reduction for reference in _installed.values() if (reduction := reference()) is not None]
    return any(reduction.sums_exactly(asked) for reduction in reductions)


def _require_whole(model: nn.Module, others: Sequence[Tensor], grid: RankGrid) -> None:
    """Refuse a parameter that the ranks of a sum hold different elements of."""
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
