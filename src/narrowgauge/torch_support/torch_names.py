"""List the private names of PyTorch that we use, with the reason and the alternative.
(``compile.py`` lists the compiler's.)

``torch._C._current_autograd_node``, ``_current_graph_task_id``, ``_autograd._get_sequence_nr``; ``Node._sequence_nr``
    Find the module of a backward operation, in the search for the first bad value. Alternative:
    naming only the node.
``FSDPModule._get_fsdp_state``, ``FSDPParamGroup`` (``fsdp_params``, ``mesh_info``, ``mp_policy``, ``_reduce_scatter_comm``,
``reduce_grads``, ``all_reduce_grads``), ``FSDPParam._unsharded_param``
    Find which parameters travel together, their order, dtypes and ranks, and what is not sent now.
    An all-reduce over replicas with nothing left to sum goes to a group of one rank. Alternative:
    the mesh as an argument.
``FSDPParam`` (``sharded_param``, ``padded_sharded_param_size``, ``_unsharded_param``,
``all_gather_outputs``, ``reset_sharded_param``, ``_init_extensions``),
``FSDPParamGroup._init_mp_dtypes``
    Parameters replaced after ``fully_shard``, as by ``to_empty``.
    FSDP2 looks for such changes only in its first forward pass. Alternative: refusing them.
``torch.distributed.distributed_c10d._get_default_store``
    A rank whose step has ended says so, before others wait for it in vain; seeds are compared.
    Alternative: the timeout.
``_orig_mod`` and ``_checkpoint_wrapped_module`` in names of modules
    Parameters are named without these prefixes. Alternative: longer names.
``torch._C._get_dispatch_mode``
    Notice that operations are being traced. PyTorch 2.11 traces the backward pass of a compiled
    function without setting ``torch.compiler.is_compiling()``. Alternative: 2.13 as the oldest
    release.
``torch._C._are_functorch_transforms_active``
    Record nothing inside a transform of ``torch.func``, whose tensors have no values. Alternative:
    none.
``torch.utils._python_dispatch._disable_current_modes``
    Try a kernel with real tensors while the compiler traces with fake ones. Alternative: trying all
    kernels when a model is prepared.
``torch._C._dynamo.guards.TensorGuards``
    Compare type, dtype, device, sizes and strides of all tensors of a step in one call. Alternative:
    checking each tensor at each step, four times slower.
``torch._compile._disable_dynamo``
    Step an optimizer uncompiled, inside a compiled function too, and import the compiler with the first
    step. Alternative: ``torch.compiler.disable``, whose import takes a second.
``torch.utils._pytree.tree_map_only``
    Find tensors in module inputs and outputs, also in named tuples and transformers' outputs.
    Alternative: 15 lines.

A release that renames one of these fails here, with a plain ImportError or AttributeError, and
nowhere else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only as tree_map_only

# ── public PyTorch, in few words ──────────────────────────────────────────────────────────────────


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device without waiting. The copy joins the device's queue."""
    # A copy from unpinned memory would have to end before its memory is reused.
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def host_tensor(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers as a tensor on the CPU, whatever default dtype and device the user has set."""
    return torch.tensor(values, dtype=dtype, device="cpu")


never_compiled = torch._compile._disable_dynamo
"""Decorate a function that no compiler traces."""


def is_captured() -> bool:
    """Return whether a CUDA graph records what runs now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class HostCopy:
    """Copy the current values of a tensor, for the host to read later.

    Reading the tensor itself would wait for all work that the device has received since.
    """

    def __init__(self, value: Tensor) -> None:
        self._done: torch.Event | None = None
        self._value = value.to("cpu", non_blocking=True, copy=True)  # into pinned memory
        if value.device.type != "cpu":
            self._done = torch.Event(value.device)
            self._done.record(torch.accelerator.current_stream(value.device))

    def cpu(self) -> Tensor:
        """Return the values. Wait only for their copy."""
        if self._done is not None:
            self._done.synchronize()
        return self._value

    def item(self) -> float:
        return float(self.cpu())


def is_traced() -> bool:
    """Return whether a function is traced: the tensors of its operations may have no values."""
    mode = torch._C._get_dispatch_mode
    keys = torch._C._TorchDispatchModeKey
    return (
        torch.compiler.is_compiling() or mode(keys.FAKE) is not None or mode(keys.PROXY) is not None
    )


is_transformed = torch._C._are_functorch_transforms_active
"""Return whether a transform of ``torch.func`` is active."""


def look_of(tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], bool]:
    """Return a check whether other tensors look as these do: by number, type, dtype, device, sizes,
    strides and a pending negation.

    It keeps no tensor. It may return ``False`` for equal tensors, as if some are one object.
    """
    from torch._C._dynamo.guards import TensorGuards

    sizes: Any = [list(tensor.shape) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return lambda others: len(others) == len(sizes) and bool(guards.check(*others))


# ── autograd, hooks, modules ──────────────────────────────────────────────────────────────────────


def autograd_node() -> Any:
    """Return the current node of the backward pass, or ``None`` outside one."""
    return torch._C._current_autograd_node()


def runs_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def next_sequence_number() -> int:
    return torch._C._autograd._get_sequence_nr()


def sequence_number(node: Any) -> int:
    """Return the number of a node; -1 for none."""
    return -1 if node is None else int(node._sequence_nr())


def no_modes() -> AbstractContextManager[Any]:
    """Return a context in which tensors are real, also while a compiler traces with fake ones."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """Return a name without the prefixes of compilers and checkpoints."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def inner_name(name: str) -> str:
    """Return a plain name without the prefix of DistributedDataParallel."""
    return plain_name(name).removeprefix("module.")


def bare_name(name: str) -> str:
    """Return an inner name without the prefix of PEFT."""
    return inner_name(name).removeprefix("base_model.model.")


# ── FSDP2 ─────────────────────────────────────────────────────────────────────────────────────────


def fsdp_groups(model: Any) -> list[tuple[Any, Any]]:
    """Return FSDP2's parameter groups in a model as pairs: a module that the group belongs to, and
    the group.
    """
    from torch.distributed.fsdp import FSDPModule

    by_id = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # PyTorch before 2.12
                groups = []
                if state._fsdp_param_group is not None:
                    groups.append(state._fsdp_param_group)
            for group in groups:
                by_id[id(group)] = module, group
    return list(by_id.values())


def fsdp_parameters(group: Any) -> list[Tensor]:
    return [parameter.sharded_param for parameter in group.fsdp_params]


def fsdp_part_size(group: Any) -> int:
    """Return the number of values of a rank's part of a group's gradients, padding included."""
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    return sum(parameter.padded_sharded_param_size.numel() for parameter in trained)


def renew_fsdp_group(group: Any) -> None:
    """Make a parameter group of FSDP2 use its modules' current parameters. None may be gathered.

    FSDP2 does so only in its first forward pass. Later passes gather into buffers of the old dtype,
    so these are remade.
    """
    for parameter in group.fsdp_params:
        parameter.reset_sharded_param()
        parameter._init_extensions()
        parameter.all_gather_outputs = []
        if hasattr(parameter, "_unsharded_param"):
            del parameter._unsharded_param
    group._init_mp_dtypes()


def fsdp_sum_dtype(group: Any, parameter: Tensor) -> torch.dtype:
    """Return the dtype in which FSDP2 sums a parameter's gradients: ``reduce_dtype``, else their
    computed dtype.
    """
    policy = group.mp_policy
    return policy.reduce_dtype or policy.param_dtype or parameter.dtype


def fsdp_keeps_gradients(group: Any) -> bool:
    """Return whether FSDP2 is set not to send, or not to all-reduce, a group's gradients now."""
    return not (group.reduce_grads and group.all_reduce_grads)


def default_store() -> Any:
    """Return the key-value store in which the ranks met."""
    return torch.distributed.distributed_c10d._get_default_store()


def fsdp_mesh(group: Any) -> tuple[Any, int | None, int | None]:
    """Return the mesh of an FSDP2 parameter group, and its dims for shards and replicas."""
    info = group.mesh_info
    return info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim


def take_over_sums(module: Any, group: Any, comm: Any, alone: Any) -> Callable[[], None]:
    """Use ``comm`` to sum the gradients of an FSDP2 parameter group: reduce-scatter, all-reduce and
    division.

    Args:
        comm: an object with the methods of FSDP2's ``ReduceScatter``.
        alone: a process group of this rank alone, for the remaining all-reduce over replicas.
    Returns:
        A function that undoes it.
    """
    info = group.mesh_info
    names = "_reduce_scatter_comm", "gradient_divide_factor", "force_sum_reduction_for_comms"
    before = {name: getattr(group, name) for name in names}
    replicas = getattr(info, "replicate_process_group", None)
    module.set_custom_reduce_scatter(comm)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if replicas is not None:
        info.replicate_process_group = alone

    def undo() -> None:
        for name, value in before.items():
            setattr(group, name, value)
        if replicas is not None:
            info.replicate_process_group = replicas

    return undo


def graph_nodes(outputs: Any) -> Iterator[Any]:
    """Yield the autograd nodes from which the tensors of a structure were computed."""
    from torch.utils._pytree import tree_leaves

    nodes: list[Any] = [x.grad_fn for x in tree_leaves(outputs) if isinstance(x, Tensor)]
    seen: set[Any] = {None}
    while nodes and len(seen) < 100_000:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
            yield node


def is_compiled_model(model: Any) -> bool:
    """Return whether ``torch.compile`` runs a model, or a part of it."""
    return any(
        hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None
        for m in model.modules()
    )


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a framework's wrapper: Accelerate and Lightning store it as
    ``.optimizer``.
    """
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is None else unwrapped_optimizer(inner)


def unwrapped_model(model: Any) -> Any:
    """Return the model inside ``torch.compile`` and ``DistributedDataParallel``."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ == "DistributedDataParallel":
            inner = model.module
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner
