"""What a step gives a GPU and other ranks where FSDP2 shards the parameters, on a GPU and with ranks that are not there.

``python -m cuda.sharded_host FOLDER CHIP CASES`` shards a model of fake tensors over a fake process group as one of its ranks,
fills in the gradients as FSDP2 leaves them, and prints as JSON what the last step of an optimizer gives the device, what it
waits for, and which tensors it hands to which collective. PyTorch's backward engine needs a device, so no gradient is
computed: what FSDP2 itself sends is not seen here.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from cuda import host

RANKS = 8
SHAPES = ((4096, 1024), (33, 64), (5, 48), (1024,), (3,), (512, 130))
"""Of which eight ranks hold equal shards, unequal ones, or some of them none."""


class _Stream:
    """Stands for a stream and for an event: everything has happened already."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device, self.device_index, self.device_type, self.stream_id = torch.device("cuda", 0), 0, 1, 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def record_event(self, *_: object) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    wait_event = wait_stream = synchronize = record = wait = lambda *_: None


class Collectives(host.Trace):
    """Notes besides what each collective is given: dtypes, shapes, devices, and whether it lies in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and "wait" not in func.name():
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            rows = [[str(t.dtype), list(t.shape), t.device.type, t.is_contiguous()] for t in tensors]
            self.sent.append([func.name().partition("::")[2], rows])
        return super().__torch_dispatch__(func, types, args, kwargs)


class Layer(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="cuda"))


def traced(rank: int, options: dict[str, Any], turned: bool = False) -> dict[str, Any]:
    """The last step of an optimizer as one rank; as a planted fault the norms that are sent are ``turned`` float32."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from narrowgauge import AdamW, _torch

    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    trace = Collectives()
    try:
        with ExitStack() as stack:
            begin = host.stand_in(stack, trace)
            for name in ("Stream", "Event"):
                stack.enter_context(patch.object(torch.cuda, name, _Stream))
            stack.enter_context(patch.object(torch, "Event", _Stream))
            for name in ("current_stream", "default_stream"):
                stack.enter_context(patch.object(torch.cuda, name, lambda *_: _Stream()))
            stack.enter_context(patch.object(torch.cuda, "stream", lambda stream: stream))
            if turned:
                real = dist.all_reduce
                changed = lambda tensor, *given, **more: real(tensor.float(), *given, **more)  # noqa: E731
                stack.enter_context(patch.object(dist, "all_reduce", changed))
            mesh = init_device_mesh("cuda", (RANKS,))
            begin(stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True)))
            model = nn.Sequential(*map(Layer, SHAPES))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = AdamW(model.parameters(), lr=1e-3, compile=True, **options)
            for step in range(host.NUM_STEPS):
                for _, group in _torch.fsdp_groups(model):
                    _give_gradients(group)
                trace.given.clear()
                with trace if step == host.NUM_STEPS - 1 else nullcontext():
                    optimizer.step()
            shards = [list(parameter.to_local().shape) for parameter in model.parameters()]
        return {"given": trace.given, "waits": trace.waits, "sent": trace.sent, "shards": shards}
    finally:
        dist.destroy_process_group()


def _give_gradients(group: Any) -> None:
    """As FSDP2 leaves them: views of one buffer, each behind the padded sizes of those before it."""
    sizes = [each.padded_sharded_param_size.numel() for each in group.fsdp_params]
    flat = torch.empty(sum(sizes), dtype=torch.bfloat16, device="cuda")
    for number, each in enumerate(group.fsdp_params):
        local = flat.as_strided(each.sharded_size, each.contiguous_sharded_stride, sum(sizes[:number]))
        each.sharded_param.grad = each.to_sharded_dtensor(local)


if __name__ == "__main__":
    host.main(traced)
