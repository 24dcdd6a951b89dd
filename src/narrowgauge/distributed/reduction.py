"""Sum gradients across ranks by a row of ``REDUCTIONS``, for models that are sharded (FSDP2),
replicated, or both.

A step has micro-batches. Each rank computes some of them. :meth:`GradientReduction.micro_batch`
surrounds each forward and backward pass. A ``ReduceScatter`` of our own sums what FSDP2 shards,
during the backward pass. Replicated gradients are summed after it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.distributed.exchanges import (
    ONE_RANK,
    Exchange,
    RankGrid,
    group_of,
    of_mesh,
    replicated,
)
from narrowgauge.distributed.order_invariance import (
    follow_forwards,
    generator_state,
    refuse_lost,
    require_own_dtypes,
)
from narrowgauge.distributed.ranks import StepEnds, all_ranks
from narrowgauge.distributed.replicated import Replicated
from narrowgauge.distributed.sharding import settle
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.numerics.dtensor import by_group, gradient_of, local_of
from narrowgauge.spec.sums import REDUCTIONS, Reduction
from narrowgauge.torch_support import torch_names
from narrowgauge.torch_support.torch_hooks import OwnHook

_installed: weakref.WeakKeyDictionary[nn.Module, weakref.ref[GradientReduction]] = (
    weakref.WeakKeyDictionary()
)
_IN_MICRO_BATCHES = (
    "Surround each forward and backward pass with reduction.micro_batch(is_last=…), which sums "
    "them; prepare() returns it as "
    "optimizer.reduction."
)


def reduce_gradients_with(
    model: nn.Module, name: str | Reduction, *, average: bool = True, mesh: Any = None
) -> GradientReduction:
    """Sum a model's gradients across ranks by a row of ``REDUCTIONS``, from now on.

    Args:
        model: sharded by FSDP2, with replicas (HSDP) or without; wrapped in DDP; or plain, with
            equal weights on all ranks. What FSDP2 does not shard must be equal on all ranks. Freeze
            parameters first.
        name: a row of ``REDUCTIONS``, or its name.
        average: divide the sum by the number of ranks, as FSDP2 and DDP do. Otherwise the loss of
            each micro-batch is its part of the step's loss.
        mesh: the ranks that a plain model is replicated on; ``None`` for all. A sharded model has
            its own.
    Returns:
        The reduction. Surround each forward and backward pass with its ``micro_batch``. Passes
            outside are refused.
    Raises:
        RecipeError: an unknown row, a model on several meshes or with another reduction, or an
            FSDP2 mixed precision with which one rank would sum other values than several do.
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
    if isinstance(name, str):
        row = REDUCTIONS.get(name)
    else:
        row = name
    if row is None:
        raise RecipeError(
            f"no reduction is named '{name}'.",
            suggestion(str(name), REDUCTIONS) or f"There are {', '.join(REDUCTIONS)}.",
        )
    installed = reduction_of(model)
    if installed is not None:
        raise RecipeError(
            f"Cannot sum gradients with '{row.name}' because '{installed.row.name}' sums this model's "
            "gradients already.",
            "Call close() of that one first; prepare() installs one as optimizer.reduction.",
        )
    reduction = GradientReduction(model, row, average, mesh)
    _installed[inner_of(model)] = weakref.ref(reduction)
    return reduction


def reduction_of(model: nn.Module) -> GradientReduction | None:
    """Return the reduction that takes part in a model's backward passes, if there is one."""
    reference = _installed.get(inner_of(model))
    reduction = None
    if reference:
        reduction = reference()
    if reduction is None or not reduction.is_installed:
        return None
    return reduction


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    is_last: bool = True
    is_absent: bool = False


class _GroupSum:
    """Sum the gradients of a parameter group of FSDP2 by an exchange, as its
    ``set_custom_reduce_scatter`` asks.
    """

    _summed: _MicroBatch | None = None

    def __init__(self, reduction: GradientReduction, exchange: Exchange) -> None:
        self.reduction = reduction
        self.exchange = exchange

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum ``input_tensor`` of all ranks, shape [shards * n], into this rank's piece, shape [n]."""
        micro_batch = self.reduction.require_open()
        if self.reduction.is_exact and self._summed is micro_batch:
            raise RecipeError(
                "two backward passes were met in one micro-batch, whose gradients are one addend "
                "of an exact sum.",
                "Add the losses, and call backward() once.",
            )
        self._summed = micro_batch
        if micro_batch.is_absent:
            input_tensor.zero_()
        self.exchange.take(input_tensor, output_tensor, is_last=micro_batch.is_last)


class GradientReduction:
    """Sum the gradients of a model across ranks. :func:`reduce_gradients_with` makes it.

    FSDP2's groups are summed in each backward pass. The backend's sums take what autograd has
    added up on the rank. Exact sums take each micro-batch alone, and refuse what
    makes them depend on the ranks.

    Attributes:
        size, group: the number of ranks whose gradients are summed, and their process group.
        current: the micro-batch whose block is open.
    """

    def __init__(self, model: nn.Module, row: Reduction, average: bool, mesh: Any) -> None:
        settle(model)
        self.row = row
        self.is_exact = row.order_invariant
        self._model = model
        self._average = average
        # Sum the micro-batches' shards of 16 bits in float32. Exact sums need none of this.
        self.sums_in_float32 = False
        self._sums: dict[Tensor, Tensor] = {}
        self.current: _MicroBatch | None = None
        self._is_closed = False
        self._place = 0  # of the next micro-batch in its step
        self._step_ends: StepEnds | None = None
        self._exchanges: list[Exchange] = []
        self._undo: list[Callable[[], object]] = []
        self._trainable: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._arrived: set[Tensor] = set()  # parameters that got a gradient in this micro-batch
        self._fsdp = torch_names.fsdp_groups(model)
        self._ddp = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        try:
            self._take_over(model, mesh)
        except RecipeError:
            self.close()
            raise

    def _register(self, grid: RankGrid) -> Exchange:
        self._exchanges.append(Exchange(grid, self.row, self._average))
        return self._exchanges[-1]

    def _take_over(self, model: nn.Module, mesh: Any) -> None:
        sharded_ids, grid = self._take_over_shards()
        whole_params: list[Tensor] = []
        self._sharded: list[Tensor] = []
        for parameter in self._trainable:
            is_sharded = id(parameter) in sharded_ids
            (self._sharded if is_sharded else whole_params).append(parameter)
        grid = grid or _grid_of(model, mesh)
        self.size = grid.size
        self.group = grid.group
        if self.group is not None and (self.is_exact or self._fsdp):
            self._step_ends = StepEnds(self.group)
        _require_whole(model, whole_params, grid)
        self._replicated = Replicated(
            whole_params, replicated(grid.group) if grid.size > 1 else ONE_RANK, self._register
        )
        if self._ddp is not None:
            self._undo.append(lambda: setattr(model, "require_backward_grad_sync", True))
        if self.size > 1 or self.is_exact:
            # The model keeps the reduction. A strong reference in a parameter's hook would keep
            # both forever.
            arrive: Any = weakref.WeakMethod(self._arrive)
            for parameter in self._trainable:
                hook = parameter.register_post_accumulate_grad_hook(lambda p: arrive()(p))
                self._undo.append(hook.remove)
            keeper = OwnHook(functools.partial(_do_nothing, self))
            self._undo.append(inner_of(model).register_state_dict_pre_hook(keeper).remove)
        if self.is_exact:
            require_own_dtypes(self._fsdp)
        if self.is_exact and self._trainable:
            self._undo += follow_forwards(inner_of(model), self._require_surrounded)

    # ── a step ────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool = True, is_absent: bool = False) -> Iterator[None]:
        """Surround the forward and backward pass of one micro-batch.

        All ranks have equally many in a step.

        After the last, ``p.grad`` holds the sum over all micro-batches of all ranks. With
        ``average`` it is divided once by the number of ranks. A failure discards the step.

        Args:
            is_last: whether this is the step's last one.
            is_absent: this rank has no micro-batch left. It repeats one, so that all ranks take
                part in every exchange, and contributes nothing.
        Raises:
            RecipeError: gradients of an earlier step are still there. An order-invariant reduction
                also raises it if a micro-batch draws random numbers, if it does not use all
                parameters of an FSDP2 group, or if FSDP2 is set to keep gradients on a rank.
        """
        if self.current is not None or self._is_closed:
            place = "of a reduction that is closed" if self._is_closed else "within another"
            raise RuntimeError(f"micro_batch was entered {place}")
        self._begin(is_last)
        if self._ddp is not None:
            # As in its no_sync(), the sums are taken after the backward pass; but buffers are rank
            # 0's in each forward pass.
            self._ddp.require_backward_grad_sync = False
            self._ddp.require_forward_param_sync = True
        self.current = _MicroBatch(is_last, is_absent)
        try:
            generators = self._generators()
            waiting: dict[Tensor, Tensor | None] = {}
            if is_absent and not self.is_exact:
                for parameter in self._replicated.parameters:
                    waiting[parameter] = parameter.grad
                    parameter.grad = None
            yield
            self._require_gradients(is_last)
            for parameter, gradient in waiting.items():
                parameter.grad = gradient
            if self.is_exact:
                self._add_exactly(self.current, generators)
            else:
                self._add(is_last)
        except BaseException:
            self._step_ends = None  # other ranks may be elsewhere
            self.discard()
            raise
        finally:
            self.current = None
        self._place = 0 if is_last else self._place + 1

    def _require_gradients(self, is_last: bool) -> None:
        whole_params = set(self._replicated.parameters)
        if any(p.grad is None and (p in whole_params or not is_last) for p in self._arrived):
            raise RecipeError(
                "a gradient was cleared in backward, before it was summed over ranks and "
                "micro-batches.",
                "Step after backward, or shard the model and give each rank one micro-batch "
                "per step.",
            )

    def _add(self, is_last: bool) -> None:
        """Add the gradients of a micro-batch. After the last, write the sums to ``p.grad``."""
        if self.sums_in_float32:
            self._add_shards(is_last)
        if is_last:
            self._replicated.add()

    def _add_shards(self, is_last: bool) -> None:
        """Add a micro-batch's gradients of sharded parameters in float32, and round the last sum."""
        for parameter in self._sharded:
            if parameter.dtype.itemsize > 2:
                continue
            gradient = gradient_of(parameter)
            if gradient is not None:
                total = gradient.float()
                if parameter in self._sums:
                    total += self._sums[parameter]
                self._sums[parameter] = total
                parameter.grad = None
            if is_last and parameter in self._sums:
                parameter.grad = self._sums.pop(parameter).to(parameter.dtype)

    def _generators(self) -> tuple[bytes, ...]:
        """Return the state of the generators that a micro-batch of an exact sum must not use."""
        if not self.is_exact:
            return ()
        if any(torch_names.fsdp_keeps_gradients(group) for _, group in self._fsdp):
            raise RecipeError(
                "Cannot sum gradients exactly because FSDP2 adds them up on each rank, by "
                "set_requires_gradient_sync(False) or set_requires_all_reduce(False).",
                "Leave both True: the sum takes each micro-batch alone.",
            )
        if self._fsdp:
            return generator_state(self._fsdp[0][1].device)
        return generator_state(next(iter(self._trainable), torch.empty(0)).device)

    def _add_exactly(self, micro_batch: _MicroBatch, before: tuple[bytes, ...]) -> None:
        """Add the gradients of one micro-batch.

        Raise if it drew random numbers or left a sharded parameter out.
        """
        after = self._generators()
        if before and after and before != after:
            raise RecipeError(
                "a micro-batch drew random numbers from PyTorch's default generator (dropout, "
                "sampling, layers left out at random), whose state depends on what this rank has "
                "computed before.",
                "Set the probabilities of dropout to 0, in attention too; or draw within "
                "torch.random.fork_rng(), seeded there by the step and the micro-batch's own "
                "number; or take another reduction.",
            )
        # For two experts in different micro-batches, FSDP2 would give the gradients the same place
        # in vectors of equal length.
        unused = next((p for p in self._sharded if p not in self._arrived), None)
        if unused is not None:
            raise RecipeError(
                "Cannot sum gradients exactly because a sharded parameter of shape "
                f"{tuple(unused.shape)} got none in a micro-batch: FSDP2 leaves it out of the "
                "vectors that are summed.",
                "Use every parameter in every micro-batch, times 0 where one leaves it out; freeze "
                "it; or keep it whole on every rank: ignored_params=… of fully_shard.",
            )
        self._replicated.add(is_absent=micro_batch.is_absent, is_last=micro_batch.is_last)
        if micro_batch.is_last:
            # Only a GPU's sums can lose a value that is too large for narrow ones.
            lost = [exchange.has_lost() for exchange in self._exchanges]
            if any(lost):
                refuse_lost(self._model)
            return
        for parameter in self._sharded:
            parameter.grad = None

    def discard(self) -> None:
        """Forget the micro-batches since the last step, and all gradients."""
        for parameter in self._trainable:
            parameter.grad = None
        self._replicated.discard()
        for exchange in self._exchanges:
            exchange.discard()
        self._sums.clear()
        self._place = 0
        self._arrived.clear()

    def bytes_per_param(self) -> float:
        """Return the bytes per parameter kept between micro-batches and steps, counted from live
        tensors.
        """
        total = sum(exchange.num_bytes() for exchange in self._exchanges)
        return total / max(1, sum(local_of(p).numel() for p in self._trainable))

    def seconds(self) -> float:
        """Return how long this rank took for this step's sums: to send, to wait for other ranks,
        and to add.
        """

        total = 0.0
        for exchange in self._exchanges:
            for began, ended in exchange.spans:
                if isinstance(ended, float):
                    total += ended - began
                else:
                    ended.synchronize()
                    total += began.elapsed_time(ended) / 1000
        return total

    @property
    def is_installed(self) -> bool:
        """Return whether it takes part in backward passes.

        It does not once closed, or if one process has nothing to sum.
        """
        return bool(self._undo)

    def close(self) -> None:
        """Restore how gradients were summed before."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._is_closed = True

    def require_open(self) -> _MicroBatch:
        """Return the micro-batch whose block is open. Refuse a backward pass outside one."""
        if self.current is None:
            problem = f"Cannot sum gradients by '{self.row.name}' in a backward pass outside micro_batch()."
            raise RecipeError(problem, _IN_MICRO_BATCHES)
        return self.current

    def _require_surrounded(self) -> None:
        """Refuse a forward pass in training outside ``micro_batch``, where nobody sees the random
        numbers that it draws.
        """
        if self.current is None:
            raise RecipeError(
                f"Cannot sum gradients by '{self.row.name}' after a forward pass outside "
                "micro_batch().",
                f"{_IN_MICRO_BATCHES} A pass without a backward pass needs torch.no_grad().",
            )

    def _arrive(self, parameter: Tensor) -> None:
        self.require_open()
        if self.is_exact and parameter in self._arrived:
            raise RecipeError(
                "two backward passes were met in one micro-batch, whose gradients are one addend "
                "of an exact sum.",
                "Add the losses, and call backward() once.",
            )
        self._arrived.add(parameter)

    def _begin(self, is_last: bool) -> None:
        if not self._place:
            if any(p.grad is not None for p in self._trainable):
                raise RecipeError(
                    "a step was begun, and gradients of an earlier one are still there.",
                    "Call zero_grad(set_to_none=True) after each step.",
                )
            self._require_known()
            for exchange in self._exchanges:
                exchange.spans.clear()
        if self._step_ends is not None:
            self._step_ends.tell(self._place + 1, is_last)
        self._arrived.clear()

    def _require_known(self) -> None:
        """Refuse trainable parameters that were frozen or missing at the start: their replicas
        would drift.
        """
        known_params = list(self._trainable)
        parameters: list[Tensor] = []
        for _, group in torch_names.fsdp_groups(self._model):
            known_params += torch_names.fsdp_gathered(group)
            parameters += torch_names.fsdp_parameters(group)
        parameters += self._model.parameters()
        known_ids = set(map(id, known_params))
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in known_ids:
                raise RecipeError(
                    f"a parameter of shape {tuple(parameter.shape)} was frozen or not in the model "
                    "when reduction "
                    f"'{self.row.name}' was installed, and is trained now.",
                    "Call close() of the reduction, and install it anew.",
                )

    def _take_over_shards(self) -> tuple[set[int], RankGrid | None]:
        """Give FSDP2's parameter groups their exchanges.

        Return the ids of the sharded parameters, and the ranks.
        """
        sharded_ids: set[int] = set()
        grids: dict[tuple[int, ...], RankGrid] = {}
        for module, group in self._fsdp:
            mesh, shard_dim, replicate_dim = torch_names.fsdp_mesh(group)
            if shard_dim is None or mesh.ndim != (1 if replicate_dim is None else 2):
                raise RecipeError(
                    f"FSDP2 shards {type(module).__name__} over a mesh of {mesh.ndim} dims; not "
                    "all sum gradients.",
                    "Shard over a mesh of one dim, or of two: replicas and shards.",
                )
            grid = of_mesh(mesh, shard_dim, replicate_dim)
            grids[tuple(dist.get_process_group_ranks(grid.group))] = grid
            comm = _GroupSum(self, self._register(grid))
            alone = None
            if grid.replicas > 1:
                alone = group_of([all_ranks().rank])
            self._undo.append(torch_names.take_over_sums(module, group, comm, alone))
            if grid.shards > 1:  # FSDP2 sums nothing over one shard: those are replicated
                sharded_ids.update(map(id, torch_names.fsdp_parameters(group)))
        if len(grids) > 1:
            raise RecipeError(
                f"a model is sharded over {len(grids)} meshes of other ranks.", "Shard it over one."
            )
        return sharded_ids, next(iter(grids.values()), None)


def _do_nothing(*_: object) -> None:
    pass


def inner_of(model: nn.Module) -> nn.Module:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def _require_whole(model: nn.Module, parameters: Sequence[Tensor], grid: RankGrid) -> None:
    """Refuse a parameter if the ranks that would add up its gradients hold different elements."""
    if grid.group is not None:
        summing = set(dist.get_process_group_ranks(grid.group))
    else:
        summing = set()
    for groups, members in by_group(parameters):
        ranks: set[int] = set()
        for group in groups:
            ranks.update(dist.get_process_group_ranks(group))
        if len(ranks & summing) > 1:
            name = next(name for name, p in model.named_parameters() if p is members[0])
            raise RecipeError(
                f"parameter '{name}' is a DTensor whose parts lie on several ranks, and FSDP2 does not "
                "gather it.",
                "Shard it with fully_shard, or keep it whole on every rank.",
            )


def _grid_of(model: nn.Module, mesh: Any) -> RankGrid:
    if mesh is not None:
        return replicated(group_of(mesh.mesh.flatten().tolist()))
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return replicated(model.process_group)
    return replicated()
