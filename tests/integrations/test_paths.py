"""Where a framework's names are imported from: one path now, and for a release the former module, which says so."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

FORMER = {
    "huggingface_callback": ("huggingface", "NarrowgaugeCallback"),
    "huggingface_optimizer": ("huggingface", "optimizer_factory"),
    "lightning_monitor": ("lightning", "NarrowgaugeMonitor"),
    "lightning_precision": ("lightning", "NarrowgaugePrecision"),
    "torchtitan_converter": ("torchtitan", "NarrowgaugeConverter"),
    "torchtitan_metrics": ("torchtitan", "with_record"),
    "torchtitan_optimizer": ("torchtitan", "with_recipe"),
}
NEEDED = {"huggingface": "accelerate", "lightning": "lightning", "torchtitan": "torchtitan"}


@pytest.mark.parametrize("former", FORMER)
def test_a_former_module_works_and_says_the_present_path(former: str) -> None:
    framework, name = FORMER[former]
    path = f"narrowgauge.integrations.{former}"
    assert find_spec(path) is not None
    if find_spec(NEEDED[framework]) is None or (framework == "torchtitan" and find_spec("triton") is None):
        pytest.skip(f"{NEEDED[framework]}, or what it needs, is not installed")
    sys.modules.pop(path, None)
    with pytest.warns(DeprecationWarning, match=rf"{path} is now narrowgauge.integrations.{framework}\.") as said:
        module = import_module(path)
    assert len(said) == 1
    assert getattr(module, name) is getattr(import_module(f"narrowgauge.integrations.{framework}"), name)


def test_no_other_module_is_found_by_a_former_name() -> None:
    assert find_spec("narrowgauge.integrations.lightning_gradients") is None
