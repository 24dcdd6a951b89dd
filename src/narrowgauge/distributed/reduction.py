"""Sum gradients over ranks and micro-batches exactly, for models that are sharded (FSDP2),
replicated, or both: *each micro-batch's gradient goes to its owner, who adds it exactly.*

A ``ReduceScatter`` of our own sums what FSDP2 shards, during the backward pass. Whole gradients are
summed after it. PyTorch's own sums (``native``, ``float32``) need nothing from here.

The sum of a step depends only on its micro-batches if each gradient depends on its sequences alone
and is added separately. So no micro-batch may draw from a generator that earlier work on this rank
has advanced, and no rank may add up gradients before it sends them. Clip by ``max_grad_norm=`` of
our optimizers: PyTorch's norm depends on the number of ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgauge.distributed.exact_sum import ExactSum
from narrowgauge.distributed.ranks import all_ranks, has_group
from narrowgauge.distributed.sharding import reshard_modules
from narrowgauge.errors import RankError, RecipeError
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support import torch_names
from narrowgauge.torch_support.torch_hooks import OwnHook


def reduce_gradients_with(
    model: nn.Module,
    name: str = "reproducible",
    *,
    average: bool = True,
    mesh: Any = None,
) -> GradientReduction:
    """Sum a model's gradients across ranks exactly, from now on.

    Args:
        model: sharded by FSDP2, with replicas (HSDP) or without; or plain, with equal weights on all
            ranks, in place of one in DDP. What FSDP2 does not shard must be equal on all ranks. Freeze
            parameters first.
        name: ``"reproducible"``, the one sum that is not PyTorch's.
        average: divide the sum by the number of ranks, as FSDP2 and DDP do. Otherwise the loss of
            each micro-batch is its part of the step's loss.
        mesh: the ranks that a plain model is replicated on; ``None`` for all. A sharded model has
            its own.
    Returns:
        The reduction. Surround each forward and backward pass with its ``micro_batch``. Passes
            outside are refused.
    Raises:
        RecipeError: another name, a model on several meshes, with running statistics or with another reduction, or an FSDP2
            mixed precision with which one rank would sum other values than several do.
    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> reduction = reduce_gradients_with(model, average=False)
        >>> for k in range(3):
        ...     with reduction.micro_batch(is_last=k == 2):
        ...         model(torch.tensor([1.0, 2.0])).backward()
        >>> model.weight.grad
        tensor([[3., 6.]])
    """
    if name != "reproducible":
        raise RecipeError(
            f"Cannot sum gradients by '{name}' because only 'reproducible' is a sum of ours.",
            "Call fully_shard, or wrap the model in DistributedDataParallel; for float32 sums, with "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32).",
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise RecipeError(
            "Cannot sum the gradients of a model in DistributedDataParallel because it sums them too.",
            "Give the model that it wraps, with equal weights on all ranks, and call that one.",
        )
    require_summable(model)
    return GradientReduction(model, average, mesh)


def require_summable(model: nn.Module) -> None:
    """Refuse a second reduction, and running statistics, which depend on which micro-batches a rank
    has seen.
    """
    if reduction_of(model) is not None:
        raise RecipeError(
            "Cannot sum gradients because a reduction sums this model's gradients already.",
            "Call close() of that one first; prepare() installs one as optimizer.reduction.",
        )
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.training:
            raise RecipeError(
                f"Cannot have the same bits on any number of ranks because '{name}' has running "
                "statistics, which depend on the micro-batches that a rank has seen.",
                "Replace it by a layer norm or group norm, or take another reduction.",
            )


def reduction_of(model: nn.Module) -> GradientReduction | None:
    """Return the reduction that takes part in a model's backward passes, if there is one."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, _Guard):
            return hook.reduction
    return None


class _Guard(OwnHook):
    """Refuse forward passes in training outside ``micro_batch``, where nobody sees the random
    numbers that they draw.
    """

    def __init__(self, reduction: GradientReduction) -> None:
        super().__init__(self._enter)
        self.reduction = reduction

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or torch_names.runs_backward():
            return
        if module.training and torch.is_grad_enabled():
            self.reduction.require_open("after a forward pass")


class _GroupSum:
    """Sum the gradients of a parameter group of FSDP2, as its ``set_custom_reduce_scatter`` asks."""

    def __init__(self, reduction: GradientReduction, exact_sum: ExactSum, part_size: int) -> None:
        self.reduction = reduction
        self.exact_sum = exact_sum
        self.part_size = part_size

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        """Sum ``input_tensor`` of all ranks, ``[shards * n]``, into this rank's piece ``[n]``."""
        self.reduction.arrive(self)
        if output_tensor.numel() != self.part_size:  # before others wait for vectors of this length
            raise _unused("of a group")
        if self.reduction.is_absent:
            input_tensor.zero_()
        total = self.exact_sum.add(input_tensor, is_last=self.reduction.is_last)
        if total is None:
            output_tensor.zero_()  # FSDP2 shows it as a gradient
        else:
            output_tensor.copy_(total)


class GradientReduction:
    """Sum the gradients of a model across ranks. :func:`reduce_gradients_with` makes it.

    Attributes:
        size: the number of ranks whose gradients are summed.
        is_last, is_absent: of the micro-batch whose block is open.
    """

    def __init__(self, model: nn.Module, average: bool, mesh: Any) -> None:
        reshard_modules(model)
        self._model = model
        self._fsdp = torch_names.fsdp_groups(model)
        self._groups = _groups_of(model, self._fsdp, mesh)
        self.size = prod(group.size() for group in self._groups)
        self._divisor = self.size if average else 1
        self._place = 0  # of the next micro-batch in its step
        # Whole parameters and groups of FSDP2 with a gradient of this micro-batch.
        self._arrived: set[Any] = set()
        self._used: set[Tensor] = set()  # those with one of this step
        self._is_open = False
        self.is_last = True
        self.is_absent = False
        self._sums: list[ExactSum] = []
        self._params = [p for p in self._model.parameters() if p.requires_grad]
        self._undo: list[Callable[[], object]] = []
        in_groups = self._take_over_groups()
        self._sharded = [p for p in self._params if id(p) in in_groups]
        self._whole = [p for p in self._params if id(p) not in in_groups]
        self._buckets: dict[ExactSum, list[Tensor]] = {}
        self._watch()

    def _take_over_groups(self) -> set[int]:
        """Let our sums reduce FSDP2's parameter groups. Return the ids of the parameters whose
        gradients they sum over shards.
        """
        in_groups: set[int] = set()
        alone = None
        for module, group in self._fsdp:
            _require_own_dtypes(module, group)
            in_groups.update(map(id, torch_names.fsdp_parameters(group)))
        _require_gathered(self._model, in_groups)
        meshes = [torch_names.fsdp_mesh(group) for _, group in self._fsdp]
        # Over one shard FSDP2 sums nothing.
        sums_shards = any(mesh.size(shard_dim) > 1 for mesh, shard_dim, _ in meshes)
        for module, group in self._fsdp:
            if torch_names.fsdp_mesh(group)[2] is not None and alone is None:
                # For FSDP2's own sum over replicas, when ours is done.
                alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            part_size = torch_names.fsdp_part_size(group)
            comm = _GroupSum(self, self._new_sum(int(sums_shards)), part_size)
            self._undo.append(torch_names.take_over_sums(module, group, comm, alone))
        return in_groups if sums_shards else set()

    def _watch(self) -> None:
        """Watch whole gradients arrive, and forward passes begin."""
        by_kind: dict[Any, list[Tensor]] = {}
        for parameter in self._whole:
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for bucket in by_kind.values():
            self._buckets[self._new_sum(0)] = bucket
        # A strong reference in a parameter's hook would keep model and reduction forever.
        arrive: Any = weakref.WeakMethod(self.arrive)
        for parameter in self._whole:
            hook = OwnHook(lambda p: arrive()(p))
            self._undo.append(parameter.register_post_accumulate_grad_hook(hook).remove)
        guard = _Guard(self)
        for module in dict.fromkeys([self._model, *[module for module, _ in self._fsdp]]):
            hook_handle = module.register_forward_pre_hook(guard, prepend=True)
            self._undo.append(hook_handle.remove)

    def _new_sum(self, num_cut: int) -> ExactSum:
        self._sums.append(ExactSum(self._groups, num_cut, self._divisor))
        return self._sums[-1]

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
            RankError: another rank has more or fewer micro-batches in this step.
            RecipeError: gradients of an earlier step are still there, the micro-batch draws random
                numbers or does not use all parameters of an FSDP2 group, or FSDP2 is set to keep
                gradients on a rank.
        """
        if self._is_open or not self._undo:  # else FSDP2 would sum as it does alone
            raise RuntimeError(
                "Cannot enter micro_batch within another, or of a closed reduction. "
                "Try one after the other, or a new reduction."
            )
        self._begin(is_last)
        self._is_open = True
        self.is_last = is_last
        self.is_absent = is_absent
        try:
            before = self._generators()
            yield
            if self._generators() != before:
                raise RecipeError(
                    "Cannot have the same bits on any number of ranks because a micro-batch drew "
                    "random numbers from PyTorch's default generator (dropout, sampling, layers "
                    "left out at random), whose state depends on what this rank has computed.",
                    "Set the probabilities of dropout to 0, in attention too; or draw within "
                    "torch.random.fork_rng(), seeded there by the step and the micro-batch's own "
                    "number; or take another reduction.",
                )
            self._end()
        except BaseException:
            self.discard()
            raise
        finally:
            self._is_open = False
        self._place += 1
        if is_last:
            self._place = 0

    def _begin(self, is_last: bool) -> None:
        self._require_same_place(is_last)
        self._arrived.clear()
        if self._place:
            return
        if any(p.grad is not None for p in self._params):
            raise RecipeError(
                "Cannot begin a step because gradients of an earlier one are still there.",
                "Call zero_grad(set_to_none=True) after each step.",
            )
        trained = {id(p) for p in self._model.parameters() if p.requires_grad}
        if trained != set(map(id, self._params)):
            raise RecipeError(
                "Cannot sum gradients because the model was sharded, or parameters were added, "
                "frozen or trained, after the reduction was installed.",
                "Call close() of the reduction, and install it anew.",
            )
        for exact_sum in self._sums:
            exact_sum.spans.clear()

    @torch.no_grad()
    def _end(self) -> None:
        """Add the gradients of whole parameters, and clear or check those of sharded ones."""
        # For two experts in different micro-batches, FSDP2 would give the gradients the same place
        # in vectors of equal length.
        unused = next((p for p in self._sharded if p.grad is None), None)
        if unused is not None:
            raise _unused(f"of shape {tuple(unused.shape)}")
        for exact_sum, bucket in self._buckets.items():
            self._add(exact_sum, bucket)
        if self.is_last:
            self._drop_unused()
        else:
            for parameter in self._params:
                parameter.grad = None

    def _add(self, exact_sum: ExactSum, bucket: Sequence[Tensor]) -> None:
        """Add the gradients of a bucket. After the last micro-batch, write their sums to them."""
        parts = []
        for parameter in bucket:
            gradient = gradient_of(parameter)
            if gradient is None and parameter in self._arrived:
                raise RecipeError(
                    "Cannot sum a gradient over ranks because it was cleared in backward.",
                    "Step after backward.",
                )
            if gradient is None or self.is_absent:
                gradient = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            else:
                self._used.add(parameter)
            parts.append(local_of(gradient).reshape(-1))
        total = exact_sum.add(torch.cat(parts), is_last=self.is_last)
        if total is None:
            return
        for parameter, part in zip(bucket, total.split([len(x) for x in parts]), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
            gradient = gradient_of(parameter)
            assert gradient is not None
            target = local_of(gradient)
            target.copy_(part.view(target.shape))

    def _drop_unused(self) -> None:
        """Drop the gradients of whole parameters that no rank has used in this step."""
        used = self._largest([int(parameter in self._used) for parameter in self._whole])
        for parameter, is_used in zip(self._whole, used, strict=True):
            if not is_used:
                parameter.grad = None
        self._used.clear()

    def _largest(self, numbers: list[int]) -> list[int]:
        """Return the largest of each number over the ranks."""
        largest = torch.tensor(numbers, dtype=torch.int64, device=all_ranks().device)
        for group in self._groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return largest.tolist()

    def _require_same_place(self, is_last: bool) -> None:
        """Refuse unequal numbers of micro-batches, before a rank waits for another in vain."""
        here = [self._place, -self._place, int(is_last), -int(is_last)]
        if self._largest(here) != here:
            number = self._place + 1
            self.discard()
            raise RankError(
                f"Cannot sum the gradients of micro-batch {number} of rank "
                f"{all_ranks().rank} because some ranks end their step with another micro-batch.",
                "Give every rank as many: one without data repeats one with is_absent=True.",
            )

    def _generators(self) -> list[bytes]:
        """Return the states of the default generators, which a micro-batch must not use, where they
        can be read.
        """
        if any(torch_names.fsdp_keeps_gradients(group) for _, group in self._fsdp):
            raise RecipeError(
                "Cannot sum gradients exactly because FSDP2 adds them up on each rank, by "
                "set_requires_gradient_sync(False) or set_requires_all_reduce(False).",
                "Leave both True: the sum takes each micro-batch alone.",
            )
        states = [torch.default_generator.get_state()]
        if torch.cuda.is_available() and not torch_names.is_captured():
            states.append(torch.cuda.get_rng_state())
        return [state.numpy().tobytes() for state in states]

    def require_open(self, when: str) -> None:
        """Refuse a pass outside :meth:`micro_batch`."""
        if not self._is_open:
            raise RecipeError(
                f"Cannot sum gradients {when} outside micro_batch().",
                "Surround each forward and backward pass with reduction.micro_batch(is_last=…), "
                "which sums them; prepare() returns it as optimizer.reduction. A pass without a "
                "backward pass needs torch.no_grad().",
            )

    def arrive(self, source: Any) -> None:
        """Refuse a second gradient of a parameter, or of a group of FSDP2, in one micro-batch."""
        self.require_open("in a backward pass")
        if source in self._arrived:
            raise RecipeError(
                "Cannot sum the gradients of two backward passes in one micro-batch because they are "
                "one addend of an exact sum.",
                "Add the losses, and call backward() once.",
            )
        self._arrived.add(source)

    def discard(self) -> None:
        """Forget the micro-batches since the last step, and all gradients."""
        for parameter in self._params:
            parameter.grad = None
        for exact_sum in self._sums:
            exact_sum.discard()
        self._used.clear()
        self._place = 0

    def seconds(self) -> float:
        """Return how long this rank took for this step's sums."""
        return sum(exact_sum.seconds() for exact_sum in self._sums)

    def close(self) -> None:
        """Restore how gradients were summed before."""
        for undo in self._undo:
            undo()
        self._undo.clear()


def _unused(which: str) -> RecipeError:
    return RecipeError(
        f"Cannot sum gradients exactly because a sharded parameter {which} got none in a "
        "micro-batch: FSDP2 leaves it out of the vectors that are summed.",
        "Use every parameter in every micro-batch, times 0 where one leaves it out; freeze it; or "
        "keep it whole on every rank: ignored_params=… of fully_shard.",
    )


def _groups_of(model: nn.Module, fsdp: Sequence[tuple[Any, Any]], mesh: Any) -> list[Any]:
    """Return the process groups over which a model's gradients are summed, shards first."""
    groups = []
    meshes = {torch_names.fsdp_mesh(group) for _, group in fsdp}
    if meshes:
        fsdp_mesh, *dims = meshes.pop()
        groups = [fsdp_mesh.get_group(dim) for dim in dims if dim is not None]
        if meshes or len(groups) != fsdp_mesh.ndim:
            raise RecipeError(
                f"Cannot sum the gradients of this {type(model).__name__} because FSDP2 shards it "
                "over several meshes, or over dims that do not all sum gradients.",
                "Shard it over one mesh of one dim, or of two: replicas and shards.",
            )
    elif mesh is not None:
        groups = mesh.get_all_groups()
    elif has_group():
        groups = [dist.group.WORLD]
    return [group for group in groups if group.size() > 1]


def _require_gathered(model: nn.Module, in_groups: set[int]) -> None:
    """Refuse parts of parameters that FSDP2 does not gather: other ranks have other elements."""
    for name, parameter in model.named_parameters():
        if is_sharded(parameter) and id(parameter) not in in_groups:
            raise RecipeError(
                f"Cannot sum the gradient of '{name}' because it is a DTensor that FSDP2 does not "
                "gather.",
                "Shard it with fully_shard, or keep it whole on every rank.",
            )


def _require_own_dtypes(module: nn.Module, group: Any) -> None:
    """Refuse sums in another dtype than the parameters': on several ranks FSDP2 would round the sum
    once more.
    """
    for parameter in torch_names.fsdp_parameters(group):
        summed = dtype_name(torch_names.fsdp_sum_dtype(group, parameter))
        stored = dtype_name(parameter.dtype)
        if summed != stored:
            raise RecipeError(
                f"Cannot sum gradients of {type(module).__name__} exactly because FSDP2 sums "
                f"them in {summed} and its parameters are {stored}.",
                f"Take reduce_dtype = {stored} in its MixedPrecisionPolicy; the exact sum needs "
                "no wider one.",
            )
