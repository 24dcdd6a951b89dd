"""Settings of PyTorch's compiler, and its noise. Names that PyTorch does not promise to keep:

``torch._dynamo.config.skip_nnmodule_hook_guards``, ``torch._dynamo.config.recompile_limit``
    By default, code compiled before a hook was attached ignores the hook. It is compiled eight
    times at most. Instead: attach before compiling, and call ``torch.compiler.reset`` between
    models.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch

MANY_VERSIONS = 64
"""Recompilation limit of one piece of code, which several rows or models may share."""


def heed_hooks() -> None:
    """Recompile code after a module's hooks have changed. This affects code compiled from now on.

    A watched model has two versions of each piece of code. A process may train several models of
    one class.
    """
    config = torch._dynamo.config
    config.skip_nnmodule_hook_guards = False
    config.recompile_limit = max(config.recompile_limit, MANY_VERSIONS)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the compiler's own deprecation warnings and banners.

    They do not concern users of an optimizer.
    """
    level = logging.getLogger("torch").level
    logging.getLogger("torch").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("torch").setLevel(level)
