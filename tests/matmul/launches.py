"""Count what a GPU would launch, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.matmul import gemm, native, operand

VIEWS = {
    "view", "t", "transpose", "detach", "expand", "unsqueeze", "select", "slice", "as_strided", "alias", "permute", "squeeze",
    "split", "_unsafe_view", "_reshape_alias", "unbind", "empty", "new_empty", "empty_like", "ones_like",
}  # fmt: skip
"""Operations that launch nothing.

The gradient of the result is ``ones_like``, and not the layer's.
"""


class Launches(TorchDispatchMode):
    """Count what a GPU would launch: every operation that is no view, and each compiled function
    once.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self.functions: set[Any] = set()
        self._inside = 0
        for module in (native, operand, gemm):
            patch.setattr(module, "fused", self._fused)

    def _fused(self, size: int, function: Callable[..., Any], *arguments: Any) -> Any:
        self.names.append(function.__name__)
        self.functions.add(function)
        self._inside += 1
        try:
            return function(*arguments)
        finally:
            self._inside -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._inside and name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def product_of_zeros(a: Tensor, b: Tensor, *_: Any, **options: Any) -> Tensor:
    """Stand in for a kernel: one launch, and a result of the right shape."""
    dtype = options.get("out_dtype") or options.get("output_dtype")
    return torch.empty(a.shape[0], b.shape[1], dtype=dtype).zero_()
