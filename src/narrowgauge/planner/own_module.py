"""A user's own module: count parameters, matmuls, memory and operations of a step on fake tensors,
which have no memory.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from narrowgauge.errors import DataError
from narrowgauge.planner.built_models import with_all
from narrowgauge.planner.shapes import Architecture, Counts, Layers, Weight
from narrowgauge.spec.update_rules import UPDATE_RULES

_FLASH = "_scaled_dot_product_flash_attention"


class LiveBytes(TorchDispatchMode):
    """Count the live bytes of storages that operations make. Gradients of ``parameters`` count
    separately.

    Attributes:
        activations, gradients: at the moment of the largest sum.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {p.untyped_storage()._cdata: 0 for p in parameters}
        self.live = self.accumulated = self.activations = self.gradients = 0
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._keep)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        if self.live > self.activations + self.gradients:
            self.activations = self.live - self.accumulated
            self.gradients = self.accumulated
        return result

    def _free(self, key: int) -> None:
        self.live -= self.sizes.pop(key)

    def _keep(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.accumulated += parameter.grad.untyped_storage().nbytes()


def of_module(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor] | None = None
) -> tuple[Architecture, int, int]:
    """Return the shape of a module with counts of one step on ``batch``, the length of a sequence
    and their number.

    The module is not called.

    Args:
        batch: a tensor, a tuple of arguments or a mapping of them. Its first tensor has the tokens,
            ``[sequences, length]``, or samples of another kind, which count as one token each.
        loss: ``loss(model, batch)``; None for the output's ``loss``, or the sum of the first
            output.
    Raises:
        DataError: the module has no matrices, the batch is empty, or a step on fake tensors fails.
    """
    tensors = [value for value in tree_leaves(batch) if isinstance(value, Tensor)]
    if not tensors or not tensors[0].numel():
        raise DataError(
            f"Cannot plan {type(model).__name__} on an empty batch.",
            "Name a batch of at least one sample.",
        )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with FakeCopyMode(mode):
            fake_model = copy.deepcopy(model)
        inputs = tree_map_only(Tensor, mode.from_tensor, batch)
        live = LiveBytes(list(fake_model.parameters()))
        flops = FlopCounterMode(display=False)
        for end in ("", "_backward"):  # the counter does not know fused attention on CPUs
            cpu = getattr(torch.ops.aten, f"{_FLASH}_for_cpu{end}")
            gpu = getattr(torch.ops.aten, f"{_FLASH}{end}")
            flops.flop_registry[cpu] = flops.flop_registry[gpu]
        try:
            with live, flops:
                # A loop holds the output until backward has run.
                output = (loss or _output)(fake_model, inputs)
                _objective(output).backward()
        except Exception as error:  # modules raise all kinds of errors on tensors without values
            raise DataError(
                f"Cannot count a step of {type(model).__name__} on fake tensors: "
                f"{str(error).splitlines()[0]}.",
                "Plan its config.json, or count its state: narrowgauge show storages --params.",
            ) from error
    first = tensors[0]
    length = num_sequences = 1
    if first.ndim:
        num_sequences = first.shape[0]
    if first.ndim == 2 and not first.is_floating_point():
        length = first.shape[1]
    tokens = num_sequences * length
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    operations = flops.get_total_flops() / tokens
    counts = Counts(tokens, live.activations, live.gradients, trained, operations)
    return _shape(model, counts), length, num_sequences


def _output(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _objective(output: Any) -> Tensor:
    """Return a tensor whose backward pass is a step's: the loss, or the first output's sum."""
    result = getattr(output, "loss", None)
    if result is None:
        result = tree_leaves(output)[0]
    total: Tensor = result.float().sum()
    return total


def _shape(model: nn.Module, counts: Counts) -> Architecture:
    """Return parameters and matmuls by size.

    One head stands for attention, so nothing is split over tensor ranks.
    """
    linears = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise DataError(
            f"Cannot plan {type(model).__name__}, because it has no nn.Linear.",
            "Plan its config.json.",
        )
    depth = 1
    rows = []  # of tables beside the head
    *inner, head = linears
    vocab, hidden = head.shape
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            depth = max(depth, len(module))
        elif isinstance(module, nn.Embedding) and module.weight is not head:
            rows += [module.num_embeddings] * (module.embedding_dim == hidden)
    matmuls = []
    for (out, size), count in Counter(weight.shape for weight in inner).items():
        matmuls.append(Weight(f"{out}x{size}", size, out, count, "mlp"))
    is_tied = vocab not in rows
    widest = max(weight.shape[0] for weight in inner or linears)
    layers = Layers(depth, tuple(matmuls), 0, inner_size=widest)
    result = Architecture(
        type(model).__name__, (layers,), hidden, vocab, 1, 1, hidden, hidden, is_gated=False, tie_embeddings=is_tied,
        positions=sum(rows) - vocab * (not is_tied), counts=counts,
    )  # fmt: skip
    return with_all(result, sum(p.numel() for p in model.parameters()))


def refuse_options(**options: Any) -> None:
    """Raise if an option of a named model is set for a counted module."""
    for name, value in options.items():
        if value:
            advice = "Change the module itself, then plan it."
            if name in ("sequence_length", "tokens_per_step"):
                advice = "Name another batch, or fix layout='micro_batches=N'."
            raise DataError(
                f"Cannot plan a module with {name} because its step is counted on the batch.",
                advice,
            )


def question_of(optimizer: Any) -> tuple[str, str]:
    """Return the rule and the storage of an optimizer: of this project, or of PyTorch with states
    of the weights' dtype.
    """
    rule = "adamw"
    for name, row in UPDATE_RULES.items():
        if row.optimizer == type(optimizer).__name__:
            rule = name
            break
    parameters = []
    for group in optimizer.param_groups:
        parameters += [p for p in group["params"] if p.requires_grad and p.ndim > 1]
    if not parameters:
        raise DataError(
            f"Cannot plan {type(optimizer).__name__} because it has no matrices.",
            "Name a rule (optimizer='adamw') and recipes.",
        )
    first = parameters[0]
    if hasattr(optimizer, "storage_of"):
        return rule, optimizer.storage_of(first).name
    return rule, "float32" if first.dtype == torch.float32 else "naive"
