"""Where compiled code takes tensors in place, and copies where it does not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loaded = Callable[[list[Tensor]], list[Tensor]]
"""Compiled code: takes a list of tensors (and empties it), returns the list of results."""

_ALIGNMENT = 16


def is_aligned(tensor: Tensor) -> bool:
    """Whether compiled code takes a tensor where it lies: on a CPU anywhere, on a GPU at a multiple of 16 bytes.

    Allocations begin at such multiples. Views into a flat buffer, or the second half of an odd number of rows, may not.
    """
    return tensor.is_cpu or tensor.data_ptr() % _ALIGNMENT == 0


def on_aligned(run: Loaded) -> Loaded:
    """A compiled function that writes to tensors wherever they begin.

    Triton's kernels take 16 bytes at a time, and Inductor clones the arguments that such a kernel only reads, but not those that
    it writes (``copy_if_misaligned`` in the code of torch 2.13). Here all that are not aligned are replaced by copies first, and
    those of tensors that are passed twice are copied back.

    Cost: two copies, and their memory, of each tensor that is not aligned.
    """

    def call(arguments: list[Tensor]) -> list[Tensor]:
        if all(map(is_aligned, arguments)):
            return run(arguments)
        copies: dict[int, Tensor] = {}
        written: list[tuple[Tensor, Tensor]] = []
        given = []
        for tensor in arguments:
            if is_aligned(tensor):
                given.append(tensor)
                continue
            place = tensor.data_ptr()
            if place in copies:
                written.append((tensor, copies[place]))
            else:
                copies[place] = tensor.clone(memory_format=torch.contiguous_format)
            given.append(copies[place])
        arguments.clear()
        results = run(given)
        for tensor, copy in written:
            tensor.copy_(copy)
        return results

    return call
