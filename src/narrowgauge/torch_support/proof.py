"""Where kernels run, and what is known of them: each is compared with its definition once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from narrowgauge.torch_support.compile import can_compile, usual_defaults
from narrowgauge.torch_support.cpp import CompilerError
from narrowgauge.torch_support.triton import runs_on

CPP = "C++"
TRITON = "Triton"
TORCH = "torch.compile"
_lock = threading.Lock()
_reasons: dict[Any, str] = {}
"""Why a kernel is not used, or an empty string: only what every later comparison would find too."""


class Proof(NamedTuple):
    """Say why a kernel cannot be used: an empty string if it has the bits of its definition.

    ``is_final``: every later comparison would find the same. An error may pass, such as a full disk.
    """

    reason: str
    is_final: bool


def language_on(device: torch.device) -> str:
    """Return the language of kernels on a device, or an empty string if there is none."""
    if runs_on(device):
        return TRITON
    return CPP if device.type == "cpu" else ""


def why_not(name: str, key: Any, device: torch.device, compare: Callable[[], bool]) -> str:
    """Return why a kernel cannot be used on a device, or an empty string.

    ``compare`` returns whether it has the bits of its definition. It is called once for a ``key``.
    """
    language = language_on(device)
    if not language:
        return f"there is no kernel for {device.type}"
    is_compiled = device.type == "cuda" or language == CPP
    if is_compiled and not can_compile("library" if language == CPP else "gpu"):
        return "there is no compiler"
    place = key, device, language
    with _lock:
        if place not in _reasons:
            proof = prove(name, language, compare)
            if not proof.is_final:
                return proof.reason
            _reasons[place] = proof.reason
        return _reasons[place]


def prove(name: str, language: str, compare: Callable[[], bool]) -> Proof:
    """Compare a kernel with its definition. Warn if it cannot be used."""
    is_final = False
    try:
        with usual_defaults():
            if compare():
                return Proof("", True)
        is_final = True
        reason = f"{language} compiles {name} to code that gives other bits"
    except (MemoryError, torch.OutOfMemoryError):
        raise  # another call may have the memory
    except Exception as error:  # a broken compiler must not stop a training run
        is_final = isinstance(error, CompilerError)
        line = (str(error).splitlines() or [""])[0][:160]
        reason = f"Cannot compile {name} ({type(error).__name__}: {line})"
    factor = "about 25 times " if language == CPP else ""
    warnings.warn(
        f"{reason}. It runs uncompiled: {factor}slower, with the same bits.", stacklevel=4
    )
    return Proof(reason, is_final)
