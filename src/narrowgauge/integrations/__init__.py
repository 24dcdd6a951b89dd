"""Recipes in other people's training loops: Lightning, Hugging Face, torchtitan, and loops of your own.

Each package imports the framework that it serves when one of its names is asked for, and nothing else in Narrowgauge imports it:
``import narrowgauge`` needs none of the frameworks.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from narrowgauge._public import offer

_MOVED = {
    "huggingface_callback": "huggingface.callback",
    "huggingface_optimizer": "huggingface.training_arguments",
    "lightning_monitor": "lightning.monitor",
    "lightning_precision": "lightning.precision",
    "torchtitan_converter": "torchtitan.converter",
    "torchtitan_metrics": "torchtitan.metrics",
    "torchtitan_optimizer": "torchtitan.optimizers_container",
}
"""Modules that users imported under the names on the left, which work until the next release."""


class _MovedModules(MetaPathFinder, Loader):
    """Imports a module of :data:`_MOVED` by its former name, with a warning that says the present one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == __name__ and name in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        present = f"{__name__}.{_MOVED[module.__name__.rpartition('.')[2]]}"
        public = present.rpartition(".")[0]
        warnings.warn(f"{module.__name__} is now {public}.", DeprecationWarning, stacklevel=2)
        found = import_module(present)
        module.__dict__["__getattr__"] = lambda name: getattr(found, name)
        # torchtitan knows an override of its command line by the module that defined it.
        overrides = getattr(sys.modules.get("torchtitan.config.override"), "_REGISTRY", {})
        for row in [row for row in overrides.values() if row.origin_module == present]:
            overrides[f"{module.__name__}.{row.factory.__name__}"] = row


sys.meta_path.append(_MovedModules())
__getattr__, __dir__ = offer(__name__)
