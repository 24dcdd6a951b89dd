"""Where printed kernels run, and what is known of them: each is compared with its definition once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from narrowgauge.torch_support.compile import can_compile
from narrowgauge.torch_support.cpp import CPP
from narrowgauge.torch_support.printer import prove
from narrowgauge.torch_support.triton import TRITON, runs_on

_lock = threading.Lock()
_reasons: dict[Any, str] = {}
"""Why a printed kernel is not used, or an empty string: only what every later comparison would find
too.
"""


def language_on(device: torch.device) -> str:
    """Return the language of printed kernels on a device, or an empty string if there is none."""
    if runs_on(device):
        return TRITON.name
    return CPP.name if device.type == "cpu" else ""


def why_not_printed(name: str, key: Any, device: torch.device, compare: Callable[[], bool]) -> str:
    """Return why a printed kernel cannot be used on a device, or an empty string.

    ``compare`` returns whether it has the bits of its definition. It is called once for a ``key``.
    """
    language = language_on(device)
    if not language:
        return f"nothing is printed for {device.type}"
    is_compiled = device.type == "cuda" or language == CPP.name
    if is_compiled and not can_compile("printed" if language == CPP.name else "gpu"):
        return "there is no compiler"
    place = key, device, language
    with _lock:
        if place not in _reasons:
            proof = prove(name, language, compare)
            if not proof.is_final:
                return proof.reason
            _reasons[place] = proof.reason
        return _reasons[place]
