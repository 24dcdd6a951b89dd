"""Modules that moved, under their former names: those that users imported, and those that pickled objects name.

An import of a former module gives one that forwards each name to the present module. Modules in :data:`DOCUMENTED` warn and work
until the next release; those in :data:`PICKLED` do not warn: ``torch.load`` of a whole model or optimizer imports them, not a
user.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DOCUMENTED = {
    "distributed.replicas": "distributed.replica_verification",
    "integrations.huggingface_callback": "integrations.huggingface.callback",
    "integrations.huggingface_optimizer": "integrations.huggingface.training_arguments",
    "integrations.lightning_monitor": "integrations.lightning.monitor",
    "integrations.lightning_precision": "integrations.lightning.precision",
    "integrations.torchtitan_converter": "integrations.torchtitan.converter",
    "integrations.torchtitan_metrics": "integrations.torchtitan.metrics",
    "integrations.torchtitan_optimizer": "integrations.torchtitan.optimizers_container",
    "loggers.available": "runs.loggers.logger",
    "spec.toml_text": "spec.toml",
    "transforms.unit_export": "transforms.unit_scaling",
}
"""Modules that users imported under the names on the left."""
PICKLED = {
    "gauges.recorder": "gauges.sampling",
    "loggers": "runs.loggers",  # the parent of loggers.available
    "matmul.grouped": "matmul.experts",
    "matmul.linears": "matmul.swapping",
    "optim.buckets": "optim.state",
    "optim.elementwise_optimizers": "optim.optimizers",
    "optim.matrix_optimizers": "optim.optimizers",
    "optim.packing": "optim.codec",
    "optim.registry": "optim.reconcile",
    "optim.stores": "optim.state",
    "optim.update": "optim.codec",
    "spec.accumulations": "spec.sums",
    "spec.codes": "spec.storages",
    "spec.gathering": "spec.computes",
    "spec.probes": "runs.arithmetic",
    "spec.reductions": "spec.sums",
    "spec.slots": "spec.computes",
    "transforms.scaled_functions": "transforms.scalify",
    "transforms.unit_rules": "transforms.unit_layers",
}
"""Modules whose classes and functions pickled models and optimizers name."""
_PRESENT = DOCUMENTED | PICKLED
RENAMED = {"matmul.linears": {"Linears": "NarrowLayers"}, "optim.stores": {"Store": "ParameterState"}}
"""Present names of classes that are renamed, by former module."""
_PACKAGE = "narrowgauge."


class _Forwarding:
    """Loads a former module."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix(_PACKAGE)
        present = _PACKAGE + _PRESENT[name]
        if name in DOCUMENTED:
            public = present.rpartition(".")[0] if name.startswith("integrations.") else present
            warnings.warn(f"{module.__name__} is now {public}.", DeprecationWarning, stacklevel=2)
        found, renamed = import_module(present), RENAMED.get(name, {})

        def forward(attribute: str) -> Any:
            return getattr(found, renamed.get(attribute, attribute))

        module.__dict__["__getattr__"] = forward
        # torchtitan knows an override of its command line by the module that defined it.
        overrides = getattr(sys.modules.get("torchtitan.config.override"), "_REGISTRY", {})
        for row in [row for row in overrides.values() if row.origin_module == present]:
            overrides[f"{module.__name__}.{row.factory.__name__}"] = row


def find_former(fullname: str) -> ModuleSpec | None:
    """The specification of a former module, with which Python imports it; ``None`` for any other name.

    Args:
        fullname: such as ``"narrowgauge.spec.toml_text"``.
    """
    name = fullname.removeprefix(_PACKAGE)
    if name == fullname or name not in _PRESENT:
        return None
    return ModuleSpec(fullname, _Forwarding(), is_package=name == "loggers")  # type: ignore[arg-type]
