"""Every name of PyTorch that we use and that it does not promise to keep, with the reason and the way out; the compiler's are in
``inductor.py``.

``torch._higher_order_ops.effects._register_effectful_op``
    Gauges mark tensors from inside compiled code; the operator returns nothing and must not be removed as dead code. The way
    out: ``torch.library.Library.register_effect`` once it is public, or marking in eager mode only.
``torch._C._current_autograd_node``, ``_current_graph_task_id``, ``_autograd._get_sequence_nr``; ``Node._sequence_nr``
    Which module a backward operation belongs to, in the search for the first bad value. The way out: naming only the node.
``DTensor._local_tensor``
    FSDP2 looks there for ``fsdp_pre_all_gather``, and ``to_local`` of a parameter returns another object. The way out: gathering
    weights in their own format.
``torch.library.get_kernel``, ``Library.impl(…, allow_override=True)``
    Replaces fused attention of 16-bit operands by float32 on a CPU that does not multiply them, for every caller. The way out:
    PyTorch's own kernel, which is slow there.
``FSDPModule._get_fsdp_state``, ``FSDPParamGroup`` (``fsdp_params``, ``mesh_info``, ``mp_policy``, ``_reduce_scatter_comm``,
``_all_gather_comm``, ``reduce_grads``, ``all_reduce_grads``, ``reduce_scatter_unused_params``), ``FSDPParam._unsharded_param``
    Which parameters travel together, in which order, in which dtypes, between which ranks, what gathered and summed them before,
    and what is not sent now; an all-reduce over replicas that has nothing left to sum is sent to a group of one rank. The way
    out: the mesh as an argument, and zeros on all replicas but one.
``FSDPParam`` (``sharded_param``, ``_module_info``, ``_unsharded_param``, ``all_gather_outputs``, ``reset_sharded_param``,
``_init_extensions``), ``FSDPParamGroup._init_mp_dtypes``
    A recipe changes the format of parameters that are sharded already; FSDP2 looks for such changes in its first forward pass,
    which is too late for gradient sums and optimizers, or was before. The way out: refusing models that the caller has sharded.
``_fsdp_orig_uid`` of a parameter that ``fully_shard`` has taken out of its module (PyTorch 2.11 leaves no such mark)
    An optimizer that was made before it steps such parameters, which never get a gradient. The way out: torch's silence.
``torch.nn.utils.clip_grad._get_total_norm``
    ``clip_grad_norm_`` looks the norm up there, whose sum over shards has the order of the ranks. The way out: only
    ``max_grad_norm=`` of our optimizers.
``torch.autograd.Variable._execution_engine.queue_callback``
    Replicated parameters are summed when a backward pass ends. The way out: a call after it.
Functions of ``torch.distributed`` and ``torch.distributed.distributed_c10d``, replaced while a run is watched
    PyTorch does not tell Python code what its collectives send and how long they take. The way out: columns that stay empty.
``DistributedDataParallel`` reads ``_ddp_params_and_buffers_to_ignore`` (looked up in PyTorch 2.13; only of what it wraps itself)
    It sends the first rank's buffers to all before each forward pass; a narrow layer's say which sequences of the batch are on
    this rank. The way out: ``broadcast_buffers=False``, which a user must pass.
``DistributedDataParallel._join_config``, ``_comm_hooks``
    Whether ranks may have run out of data, which would not answer another's question, and whether gradients are rounded on their
    way. The way out: gradients over ranks that are not checked.
Names of modules under ``torch.compile`` and checkpoints, ``_orig_mod`` and ``_checkpoint_wrapped_module``
    Parameters are named without these prefixes. The way out: longer names.

Frames of ``Tensor.backward``, ``torch.autograd.backward``, ``GradScaler.step`` and of what ``torch.compile`` returns;
``Node._input_metadata``
    Which loss is differentiated, in which formats it and the model's outputs were computed, and who calls an optimizer's step, in
    loops of other people that are watched. The way out: checks and comparisons that see less.
``Optimizer._optimizer_step_post_hooks``
    Whether a hook may remove itself now: PyTorch iterates over them while it calls them. The way out: removing it in the next
    forward pass.
``torch.distributed.distributed_c10d._get_default_store``
    Ranks compare a few numbers in a check that one rank may call alone, where a collective would wait forever. The way out: no
    such check.
``torch.utils._python_dispatch._disable_current_modes``
    A kernel is tried with real tensors where the compiler asks, among fake ones, which dtype its operands have. The way out:
    trying all kernels when a model is prepared.

A release that renames one of these fails here, with a plain ImportError or AttributeError, and nowhere else.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from narrowgauge._torch.inductor import quiet
from narrowgauge.spec.frameworks import untested_torch


def _warn_of_release() -> None:
    """Once for a run: by its first rank, and not in processes started to load data or compile."""
    told = untested_torch(torch.__version__)
    if told and os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None:
        warnings.warn(told, stacklevel=2)


_warn_of_release()


def autograd_node() -> Any:
    """The node of the backward pass whose operations run now; ``None`` outside of one."""
    return torch._C._current_autograd_node()


def runs_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def current_backward() -> int:
    """A number for the backward pass that this thread is inside of; -1 outside."""
    return torch._C._current_graph_task_id()


def local_shard(parameter: Any) -> Tensor:
    """The very tensor that FSDP2 shards, gathers and asks for its extensions: this rank's shard of a DTensor."""
    shard: Tensor = parameter._local_tensor
    return shard


def next_sequence_number() -> int:
    return torch._C._autograd._get_sequence_nr()


def sequence_number(node: Any) -> int:
    """The number of a node; -1 for none."""
    return -1 if node is None else int(node._sequence_nr())


def keep_effect(operator: Any) -> None:
    """Declare that a custom operator has side effects, so that the compiler removes no call of it."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(operator._opoverload, _EffectType.ORDERED)


def no_modes() -> AbstractContextManager[Any]:
    """Within it tensors are real, also while a compiler traces with fake ones."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


_OVERRIDES: list[torch.library.Library] = []


def wrap_cpu_kernel(name: str, wrapper: Callable[..., Any]) -> None:
    """Replace an operator's CPU kernel for good: ``wrapper`` is called with the old kernel, then the arguments."""
    kernel = torch.library.get_kernel(name, "CPU")
    library = torch.library.Library("aten", "IMPL")

    def wrapped(keys: Any, *args: Any, **options: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            return kernel.call_boxed(keys, *args, **options)

        return wrapper(call, *args, **options)

    with quiet():
        library.impl(name.removeprefix("aten::"), wrapped, "CPU", with_keyset=True, allow_override=True)
    _OVERRIDES.append(library)  # the override lives as long as it does


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """A name without those of compilers and checkpoints around the module."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def leave_out_of_ddp(model: Any, names: Iterable[str]) -> None:
    """Let DistributedDataParallel neither send nor sum the tensors of these names in the model."""
    model._ddp_params_and_buffers_to_ignore = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names}


def fsdp_groups(model: Any) -> list[tuple[Any, Any]]:
    """The parameter groups of FSDP2 in a model, each with a module that it was made for."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # PyTorch before 2.12
                groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
            found.update((id(group), (module, group)) for group in groups)
    return list(found.values())


def fsdp_dtypes(model: Any) -> set[torch.dtype]:
    """The dtypes to which FSDP2 casts the parameters it gathers in a model; none where it casts none."""
    return {policy.param_dtype for policy in fsdp_policies(model) if policy.param_dtype is not None}


def fsdp_policies(model: Any) -> list[Any]:
    """The mixed-precision policies by which FSDP2 gathers a model: a group's, and from PyTorch 2.15 on each parameter's."""
    return [fsdp_policy(group, p) for _, group in fsdp_groups(model) for p in fsdp_parameters(group)]


def fsdp_policy(group: Any, parameter: Tensor) -> Any:
    """The mixed-precision policy by which FSDP2 gathers a parameter of a group: the group's, from PyTorch 2.15 on its own."""
    whole = getattr(group, "mp_policy", None)
    return whole or next(each.mp_policy for each in group.fsdp_params if each.sharded_param is parameter)


def fsdp_parameters(group: Any) -> list[Tensor]:
    return [parameter.sharded_param for parameter in group.fsdp_params]


def fsdp_places(group: Any) -> list[tuple[Tensor, list[tuple[Any, str]]]]:
    """The sharded parameters of a group of FSDP2, each with the modules it is put back into, and its names there."""
    found = []
    for parameter in group.fsdp_params:
        info = parameter._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        found.append((parameter.sharded_param, [(info.module, info.param_name), *shared]))
    return found


def fsdp_gathered(group: Any) -> list[Tensor]:
    """What stands in the modules in place of a group's sharded parameters while these are gathered, if it has been made."""
    return [p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")]


def renew_fsdp_group(group: Any) -> None:
    """Let a parameter group of FSDP2, none of whose parameters is gathered, take those that its modules hold now.

    FSDP2 does so only in its first forward pass; what later ones gather into has the dtype of that time, and is made anew.
    """
    for parameter in group.fsdp_params:
        parameter.reset_sharded_param()
        parameter._init_extensions()
        parameter.all_gather_outputs = []
        if hasattr(parameter, "_unsharded_param"):
            del parameter._unsharded_param
    group._init_mp_dtypes()


def was_taken_by_fsdp(parameter: Tensor) -> bool:
    """Whether FSDP2 has replaced this whole parameter by another one, and never gives it a gradient.

    It does so in ``fully_shard``, where some versions of PyTorch leave no mark, and after a forward pass, with what it has
    gathered.
    """
    is_plain = type(parameter) is torch.nn.Parameter and parameter.numel() > 0
    return hasattr(parameter, "_fsdp_orig_uid") or (is_plain and not parameter.untyped_storage().size())


def fsdp_sum_dtype(group: Any, parameter: Tensor) -> torch.dtype | None:
    """The dtype in which FSDP2 sums a parameter's gradients: its policy's ``reduce_dtype``, else the one they are computed in.

    ``None`` where it rounds them to another dtype before they would be summed, if only one rank holds the group.
    """
    policy, stored = fsdp_policy(group, parameter), parameter.dtype
    computed = policy.param_dtype or stored
    summed: torch.dtype = policy.reduce_dtype or computed
    kept = _holds(stored, summed) or (_holds(stored, computed) and _holds(summed, computed))
    return summed if kept else None


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a floating-point dtype has all values of another."""
    return torch.promote_types(wide, narrow) == wide


def fsdp_keeps_gradients(group: Any) -> bool:
    """Whether FSDP2 was told not to send, or not to all-reduce, the gradients of a group now."""
    return not (group.reduce_grads and group.all_reduce_grads)


def fsdp_lacks_zeros(group: Any) -> bool:
    """Whether FSDP2 was told to send zeros for unused parameters of a group, and sends none since none was ever gathered."""
    is_asked = getattr(group, "reduce_scatter_unused_params", False)  # PyTorch 2.13
    return is_asked and any(not hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params)


class _AnnouncedGather:
    """What gathers a group's weights, and says so before."""

    def __init__(self, comm: Any, announce: Callable[[int], None]) -> None:
        self._comm, self._announce = comm, announce

    def allocate(self, *args: Any, **options: Any) -> Any:
        return self._comm.allocate(*args, **options)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        self._announce(input_tensor.numel() * input_tensor.element_size())
        return self._comm(output_tensor, input_tensor, *args, **options)


def announce_gathers(group: Any, announce: Callable[[int], None]) -> Callable[[], None]:
    """Call a function before each gather of a group of FSDP2, with the bytes of this rank's shard; returns what undoes it."""
    before = group._all_gather_comm
    group._all_gather_comm = _AnnouncedGather(before, announce)

    def undo() -> None:
        group._all_gather_comm = before

    return undo


def replace_total_norm(wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
    """Replace what takes the norm in ``clip_grad_norm_``, and ``torch.nn.utils.get_total_norm``, for good."""
    from torch.nn import utils
    from torch.nn.utils import clip_grad

    new = wrap(clip_grad._get_total_norm)
    clip_grad._get_total_norm = new
    utils.get_total_norm = new


def fsdp_columns(group: Any) -> list[tuple[Any, int]]:
    """What one row (that of one shard) of a group's flat gradient holds: sharded parameters, each with its elements."""
    return [(parameter.sharded_param, parameter.padded_sharded_param_size.numel()) for parameter in group.fsdp_params]


def swap_reduce_scatter(group: Any, comm: Any) -> Any:
    """Give a parameter group of FSDP2 another object that sums its gradients; returns the old one."""
    old, group._reduce_scatter_comm = group._reduce_scatter_comm, comm
    return old


@dataclass(frozen=True)
class FsdpMesh:
    """Between which ranks a parameter group of FSDP2 travels: a mesh, and its dims for shards and for replicas."""

    mesh: Any
    shard_dim: int | None
    replicate_dim: int | None


def fsdp_mesh(group: Any) -> FsdpMesh:
    info = group.mesh_info
    return FsdpMesh(info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim)


def take_over_sums(module: Any, group: Any, comm: Any, alone: Any) -> Callable[[], None]:
    """Let ``comm`` do all that a parameter group of FSDP2 did to sum gradients: reduce-scatter, all-reduce and division.

    Args:
        comm: an object with the methods of FSDP2's ``ReduceScatter``.
        alone: a process group of this rank alone, for the all-reduce over replicas that is left to do.
    Returns:
        What undoes it.
    """
    info = group.mesh_info
    before = group._reduce_scatter_comm, group.gradient_divide_factor, group.force_sum_reduction_for_comms
    replicas = getattr(info, "replicate_process_group", None)
    module.set_custom_reduce_scatter(comm)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if replicas is not None:
        info.replicate_process_group = alone

    def undo() -> None:
        group._reduce_scatter_comm, group.gradient_divide_factor, group.force_sum_reduction_for_comms = before
        if replicas is not None:
            info.replicate_process_group = replicas

    return undo


def queue_after_backward(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def replace_collectives(
    wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]], names: Iterable[str]
) -> Callable[[], None]:
    """Replace functions of ``torch.distributed``, for those who call them and for each other; returns what restores the old ones.

    ``wrap`` makes the new function of a name and the old one. Names that this release does not have are skipped.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    olds = {name: getattr(distributed_c10d, name) for name in names if hasattr(distributed_c10d, name)}
    for name, old in olds.items():
        new = wrap(name, old)
        setattr(distributed_c10d, name, new)
        setattr(dist, name, new)

    def restore() -> None:
        for name, old in olds.items():
            setattr(distributed_c10d, name, old)
            setattr(dist, name, old)

    return restore


def _frames(frame: FrameType | None) -> Iterator[tuple[str, FrameType]]:
    """The frames of a stack from the inside, each as ``torch/path.py:function``."""
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        yield f"{path.rpartition('site-packages/')[2]}:{frame.f_code.co_name}", frame
        frame = frame.f_back


def root_of_backward() -> Tensor | None:
    """The tensor whose ``backward`` runs now, in this thread or in the one that waits for it; ``None`` if none is found."""
    here = threading.get_ident()
    for thread in [here, *(thread for thread in sys._current_frames() if thread != here)]:
        found: Tensor | None = None  # the outermost: checkpoints have backward passes of their own
        for place, frame in _frames(sys._current_frames()[thread]):
            if place.endswith("torch/_tensor.py:backward"):
                found = frame.f_locals.get("self")
            elif place.endswith("torch/autograd/__init__.py:backward"):
                found = _first_scalar(frame.f_locals.get("tensors"))
        if found is not None:
            return found
    return None


def default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def is_joining(parallel: Any) -> bool:
    """Whether a ``DistributedDataParallel`` is within ``join()``."""
    return bool(parallel._join_config.enable)


def communication_hooks(parallel: Any) -> list[str]:
    """The names of the functions that a ``DistributedDataParallel`` exchanges gradients with, in place of its own mean."""
    return [str(getattr(hook, "__name__", hook)) for hook, _ in parallel._comm_hooks]


def _first_scalar(tensors: Any) -> Tensor | None:
    listed = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
    return next((each for each in listed if isinstance(each, Tensor) and each.ndim == 0), None)


def scalar_dtypes(root: Tensor, most: int = 64) -> set[torch.dtype]:
    """The formats of a 0-d tensor and of those 0-d tensors that it was computed from, one after another."""
    found: set[torch.dtype] = {root.dtype}
    nodes: list[Any] = [root.grad_fn]
    seen: set[Any] = set()
    while nodes and len(seen) < most:
        node = nodes.pop()
        outputs = getattr(node, "_input_metadata", ())
        if node is None or node in seen or not outputs or any(len(output.shape) for output in outputs):
            continue
        seen.add(node)
        found.update(output.dtype for output in outputs)
        nodes += [before for before, _ in node.next_functions]
    return found


def graph_dtypes(roots: Iterable[Tensor], most: int = 100_000) -> tuple[set[torch.dtype], bool]:
    """The floating-point formats of all results of PyTorch's own operations that some tensors were computed from.

    Returns:
        The dtypes; and whether there is more: autograd functions of other code, which do not show what they computed within.
    """
    found: set[torch.dtype] = set()
    nodes: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = {None}
    is_more = False
    while nodes and len(seen) < most:
        if (node := nodes.pop()) in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            is_more = True
        else:
            found |= {each.dtype for each in getattr(node, "_input_metadata", ()) if each.dtype.is_floating_point}
        nodes += [before for before, _ in node.next_functions]
    return found, is_more or bool(nodes)


def is_compiled_model(model: Any) -> bool:
    """Whether ``torch.compile`` runs a model, or a part of it."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


def scaler_of_step() -> Any:
    """The ``GradScaler`` that steps an optimizer now; ``None`` if none does."""
    for _, frame in _frames(sys._getframe()):
        if isinstance(scaler := frame.f_locals.get("self"), torch.amp.GradScaler):
            return scaler
    return None


def is_compiled_step() -> bool:
    """Whether what ``torch.compile`` made of ``optimizer.step`` itself calls a hook of that step now."""
    is_step = False
    for place, _ in _frames(sys._getframe()):
        if place.startswith("torch/optim/"):
            is_step = True
        elif is_step and not place.endswith(":_fn") and not place.startswith("narrowgauge/"):
            return place.endswith(":compile_wrapper")
    return False


def is_last_hook(optimizer: Any, handle: Any) -> bool:
    """Whether a hook after an optimizer's steps is the one that is called last."""
    return bool(next(reversed(optimizer._optimizer_step_post_hooks), None) == handle.id)
