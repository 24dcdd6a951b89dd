"""Devices that are refused: those without float64, in which norms, audits and delayed scales are exact."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from narrowgauge.errors import ChipError


def require_float64(tensors: Iterable[Tensor | None]) -> None:
    """Refuse tensors on a device that has no float64: the GPU of a Mac.

    Every way in asks here: optimizers, ``prepare``, narrow layers, accumulators, gauges, recorders and ``check``. So nothing
    runs there in part, and fails at the first audit.

    Raises:
        ChipError: one of them is on the device ``mps``.
    Example:
        >>> import torch
        >>> require_float64([torch.zeros(2)])
    """
    if any(tensor is not None and tensor.device.type == "mps" for tensor in tensors):
        raise ChipError(
            "device 'mps' was requested, a Mac's GPU, which has no float64: norms of gradients and audits are summed in it.",
            "Train on the Mac's CPU: model.to('cpu'); use_cpu=True in Hugging Face's TrainingArguments, accelerator='cpu' in "
            "Lightning.",
        )
