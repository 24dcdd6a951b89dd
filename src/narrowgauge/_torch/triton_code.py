"""What Inductor writes for a GPU, kept as text: one Python module with Triton kernels and the function that launches them.

An AOTInductor package would need the headers of a CUDA toolkit on every machine that compiles one, which ``pip install torch``
does not bring. The text needs Triton, which PyTorch's wheels for CUDA bring, and a C compiler, with which Triton builds what
launches a kernel. Nothing in it was measured on a device, so any machine writes the same text for the same chip, and that is what
the tests compile and run on arrays where there is no GPU (``tests/cuda``).

``torch._inductor.compile_fx.compile_fx``, ``torch._inductor.graph.GraphLowering.save_output_code``
    Write the module, and hand over its text before it is loaded. The way out: ``torch.compile``.
``call`` in that module
    Takes a list of tensors (and empties it), returns a tuple of results. The way out: as above.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from narrowgauge._torch.aligned import Loaded
from narrowgauge._torch.many_tensors import function_of, with_table

if TYPE_CHECKING:
    from torch.export import ExportedProgram

NOT_CACHED = {"fx_graph_cache": False, "force_disable_caches": True}
"""Inductor's own cache would answer without writing the text."""


class _Written(Exception):
    """The text is there: go no further."""


def triton_code(exported: ExportedProgram, options: Mapping[str, Any]) -> str:
    """The Python module that Inductor writes for a traced function.

    Args:
        options: of Inductor.
    Raises:
        RuntimeError: it writes none.
    Cost: 2 to 10 s.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    texts: list[str] = []
    module = exported.module(check_guards=False)
    given, _ = exported.example_inputs or ((), {})
    placeholders = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"]
    with config.patch({**options, **NOT_CACHED}), _stopped_at_text(texts):
        try:
            compile_fx(module, placeholders[-len(given) :])
        except Exception:
            if not texts:
                raise
    if not texts:
        raise RuntimeError("Inductor wrote no code")
    return with_table(texts[0])


@contextlib.contextmanager
def _stopped_at_text(texts: list[str]) -> Iterator[None]:
    """Let Inductor add the text of a module to a list, and go no further."""
    from torch._inductor.graph import GraphLowering

    def stop(text: str) -> None:
        texts.append(text)
        raise _Written

    real = vars(GraphLowering)["save_output_code"]
    GraphLowering.save_output_code = staticmethod(stop)
    try:
        yield
    finally:
        GraphLowering.save_output_code = real


def load_triton(path: Path) -> Loaded:
    """The function in a module of :func:`triton_code`.

    Where the module's kernel takes a table it is a :class:`narrowgauge._torch.many_tensors.ManyTensors`.

    Raises:
        RuntimeError: what the module imports has other names in this release, or Triton cannot compile it here.
    Cost: some seconds a kernel the first time, then Triton's own cache has it.
    """
    from torch._inductor import config

    module, text = ModuleType(path.stem), path.read_text(encoding="utf-8")
    code = compile(text, str(path), "exec")
    # A pool of processes takes longer to start than a few kernels take to compile.
    with config.patch({"compile_threads": 1}):
        try:
            exec(code, module.__dict__)
            return function_of(module, text)
        except (
            Exception
        ) as error:  # of Triton, of its C compiler, or of a release that has renamed what the module imports
            raise RuntimeError(f"PyTorch {torch.__version__} cannot run a kernel from {path}: {error}") from error
