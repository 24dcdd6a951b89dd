"""From a function's definition to PTX, on a machine without a GPU.

The function is traced on fake CUDA tensors as :mod:`narrowgauge.compile` does it; Inductor writes Triton, Triton writes PTX,
ptxas counts spilled registers. All this runs in a process that believes that it has a GPU: ``python -m cuda.lowering``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch


@dataclass(frozen=True)
class TritonKernel:
    """One kernel, compiled as it is launched.

    Args:
        config: the block sizes that Inductor chose.
        shared: bytes of shared memory of a block.
        spills: bytes that a thread has no registers for.
    """

    name: str
    ptx: str
    signature: dict[str, str]
    config: dict[str, int]
    shared: int
    spills: int


@dataclass(frozen=True)
class Lowered:
    """The module that Inductor writes, and its kernels by name."""

    text: str
    kernels: dict[str, TritonKernel]


@lru_cache
def lowered(name: str) -> Lowered:
    """Lower a definition of ``definitions.py``."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(f"{name}\n")
    server.stdin.flush()
    lines: list[str] = []
    while not lines or not lines[-1].startswith("{"):
        lines.append(server.stdout.readline())
        assert lines[-1], f"{name} was not lowered: {''.join(lines)}"
    result = json.loads(lines[-1])
    return Lowered(result["text"], {key: TritonKernel(**kernel) for key, kernel in result["kernels"].items()})


@lru_cache
def _server() -> subprocess.Popen[str]:
    """Start the process that lowers; it ends with the pipe that it reads names from."""
    places = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    # Inductor's pool of compilers would hold the pipe that this process reads.
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), **threads}
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "cuda.lowering"]
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


# ── in the process that believes ─────────────────────────────────────────────────────────────────────────────────────

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str=", re.S)


def _lower(name: str, folder: Path) -> Lowered:
    text = _written(name)
    return Lowered(text, {kernel: _compiled(kernel, source, folder) for kernel, source in KERNEL.findall(text)})


class _Written(Exception):
    """Inductor has written its module: go no further."""


@contextlib.contextmanager
def _stopped_at_text(texts: list[str]) -> Iterator[None]:
    from torch._inductor.graph import GraphLowering

    def stop(text: str) -> None:
        texts.append(text)
        raise _Written

    real = vars(GraphLowering)["save_output_code"]
    GraphLowering.save_output_code = staticmethod(stop)  # type: ignore[assignment]
    try:
        yield
    finally:
        GraphLowering.save_output_code = real  # type: ignore[assignment]


def _written(name: str) -> str:
    """Return the module that Inductor writes for a definition, with symbolic sizes and the options for a GPU."""
    from torch._inductor import config
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from cuda.definitions import definition_of
    from narrowgauge.compile import _seen_as_compiling, options

    definition = definition_of(name)
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
    arguments = [mode.from_tensor(argument) for argument in definition.cases[0]]
    with mode:
        fakes = [argument.to("cuda") for argument in arguments]
    with _seen_as_compiling():
        graph = make_fx(definition.function, tracing_mode="symbolic")(*fakes)
    texts: list[str] = []
    uncached = {"fx_graph_cache": False, "force_disable_caches": True}  # a cache would answer without the text
    with config.patch(uncached), _stopped_at_text(texts), contextlib.suppress(Exception):
        chosen = options(torch.device("cuda"), one_loop=definition.one_loop)
        torch._inductor.compile(graph, fakes, options=chosen)
    assert len(texts) == 1, "Inductor wrote no module"
    return texts[0]


def _compiled(name: str, source: str, folder: Path) -> TritonKernel:
    """Compile a kernel as Inductor would before the first launch; of several sizes of blocks the first."""
    import importlib.util

    import triton
    from triton.runtime.driver import driver

    path = folder / f"{name}_{abs(hash(source))}.py"
    path.write_text(source, "utf-8")  # Triton reads the source of a function from its file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    tuner = getattr(module, name)
    config = tuner.configs[0]
    meta = tuner._create_compile_meta(config)
    options = tuner._create_compile_options(config, meta)
    ast = triton.compiler.ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    compiled = triton.compile(ast, target=driver.active.get_current_target(), options=options)
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    signature = {str(key): str(value) for key, value in meta["signature"].items()}
    blocks = {key: int(value) for key, value in config.kwargs.items()}
    spills = _spills(ptx, metadata.target.arch, options["enable_fp_fusion"], folder)
    return TritonKernel(name, ptx, signature, blocks, int(metadata.shared), spills)


def _spills(ptx: str, capability: int, fuses: bool, folder: Path) -> int:
    from triton.backends.nvidia import compiler

    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [compiler.get_ptxas(capability).path, "-v", *([] if fuses else ["--fmad=false"])]
    command += [f"--gpu-name={compiler.sm_arch_from_capability(capability)}", str(source), "-o", f"{source}.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", report)))


def main() -> None:
    """Answer each name of a definition with a line of JSON."""
    from cuda import device

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TRITON_CACHE_DIR"] = scratch
        device.load_guard(Path(scratch))
        device.pretend(device.CHIP)
        for name in map(str.strip, sys.stdin):
            print("\n" + json.dumps(asdict(_lower(name, Path(scratch)))), flush=True)


if __name__ == "__main__":
    main()
