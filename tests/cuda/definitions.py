"""The kernels of the optimizer by name, as they are compiled for a device.

``step RULE STORAGE [audited] [wide]`` (a rule's spaces as ``_``), ``write`` and the same of a matrix rule, ``norm DTYPE``,
``accumulate ROW``, ``row peaks``, ``bounds RULE STORAGE``, and the chains of
``clip.CHAINS``.
"""

from __future__ import annotations

import torch

from narrowgauge.optim import accumulation, clip, kernel, row_bounds
from narrowgauge.optim.compilation import Definition
from narrowgauge.optim.kernel import MatrixKernel, StepKernel
from narrowgauge.optim.rules.elementwise import RULES
from narrowgauge.optim.rules.matrix import MATRIX_RULES, states_beside
from narrowgauge.spec.storages import STORAGES
from narrowgauge.spec.sums import ACCUMULATIONS


def definition_of(name: str, device: torch.device) -> Definition:
    if name in clip.CHAINS:
        return clip.CHAINS[name][0](device)
    kind, *words = name.split()
    if kind == "step":
        rule, storage, *options = words
        return step_kernel(rule.replace("_", " "), storage).define(device, "audited" in options, wide="wide" in options)
    if kind == "write":
        rule, storage, *options = words
        return matrix_kernel(rule, storage).define(device, "audited" in options, wide="wide" in options)
    if kind == "norm":
        return clip.define_norm(getattr(torch, words[0]), device, by_rows=True)
    if kind == "accumulate":
        return accumulation.define_addition(ACCUMULATIONS[words[0]], device)
    if kind == "bounds":
        own = step_kernel(*words)
        return row_bounds.define_bounds(own.rule, own.storage, device)
    assert name == "row peaks", name
    return kernel.define_row_peaks(device)


def matrix_kernel(rule: str, storage: str) -> MatrixKernel:
    kept = MATRIX_RULES[rule].states((64, 64), MATRIX_RULES[rule].defaults)
    return MatrixKernel(MATRIX_RULES[rule], STORAGES[storage].keeping(states_beside(kept)), compile=False)


def step_kernel(rule: str, storage: str) -> StepKernel:
    return StepKernel(RULES[rule], STORAGES[storage].keeping(RULES[rule].kept), compile=False)
