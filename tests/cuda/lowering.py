"""From a kernel's definition to the machine code of a GPU, on a machine without one.

The project's own path as far as it goes without a device: the definition is traced on fake tensors, Inductor writes Triton,
Triton writes PTX, ptxas writes machine code. What comes out is kept by what went in, in the folder of compiled code.

It runs in a process of its own, which believes that it has a GPU: ``python -m cuda.lowering FOLDER CHIP``, which reads names.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import kept_cache
from narrowgauge.optim.compilation import source_key

if TYPE_CHECKING:
    from cuda.casts import Call


@dataclass(frozen=True)
class TritonKernel:
    """One kernel, compiled as it is launched.

    Args:
        config: the block sizes that Inductor chose.
        num_warps: of 32 threads each.
        shared: bytes of shared memory of a block.
        registers: of a thread.
        spills: bytes that a thread has no registers for.
        instructions: of the machine code, without what it calls for subnormal quotients and roots.
        amdgcn: the machine code for AMD, which has no PTX.
    """

    name: str
    ptx: str
    signature: dict[str, str]
    config: dict[str, int]
    num_warps: int
    shared: int
    registers: int
    spills: int
    instructions: int
    amdgcn: str = ""


@dataclass(frozen=True)
class Lowered:
    """What a definition becomes: the module that Inductor writes, and its kernels by name.

    Args:
        inputs: what the module's function takes, where that is not the definition's own arguments: the number of an argument,
            for the length of one of its sides also the number of the dim; or -1 and a whole number of its own, or -2 and a float.
    """

    text: str
    kernels: dict[str, TritonKernel]
    inputs: tuple[tuple[float, ...], ...] = ()


def lowered(chip: str, name: str) -> Lowered:
    """For a chip, a definition of ``definitions.py``, or ``CAST NUMBER``: what a cast hands over."""
    path = _path(kept_folder(), chip, name)
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        server = _server(path.parent, chip)
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(f"{name}\n")
        server.stdin.flush()
        said: list[str] = []
        while said[-1:] != ["done\n"]:
            said.append(server.stdout.readline())
            assert said[-1], f"{name} was not lowered: {''.join(said)}"
    os.utime(path)  # what was used least recently is removed first
    found = json.loads(path.read_text("utf-8"))
    kernels = {name: TritonKernel(**kernel) for name, kernel in found["kernels"].items()}
    return Lowered(found["text"], kernels, tuple(map(tuple, found["inputs"])))


def kept_folder() -> Path:
    """That of the session of tests, or what sessions keep."""
    session = os.environ.get("NARROWGAUGE_CACHE")
    return (Path(session) if session else kept_cache.kept_folder()) / "cuda"


@lru_cache
def _server(folder: Path, chip: str) -> subprocess.Popen[str]:
    """The process that lowers for a chip, which takes seconds to start; it ends with the pipe that it reads names from."""
    places = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    # Inductor's pool of compilers would hold the pipe that this process reads.
    own = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(places), **own}
    command = [sys.executable, "-m", "cuda.lowering", str(folder), chip]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=given, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def _path(folder: Path, chip: str, name: str) -> Path:
    own = b"".join(
        (Path(__file__).parent / f"{part}.py").read_bytes() for part in ("lowering", "device", "definitions", "casts")
    )
    key = f"{source_key()} {torch.__version__} {version('triton')} {hashlib.sha256(own).hexdigest()} {chip} {name}"
    return (
        folder
        / f"{name.replace(' ', '-').replace('/', '_')}-{chip}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    )


# ── in the process that believes ─────────────────────────────────────────────────────────────────────────────────────

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str=", re.S)


def _lower(name: str, folder: Path) -> Lowered:
    call = re.fullmatch(r"(.*) (\d+)", name)
    return _lower_call(call[1], int(call[2]), folder) if call else _lower_definition(name, folder)


def _lower_definition(name: str, folder: Path) -> Lowered:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cuda.definitions import definition_of
    from narrowgauge._torch.inductor import compile_ahead, trace

    with FakeTensorMode():
        definition = definition_of(name, torch.device("cuda", 0))
    program = trace(definition.function, definition.example, definition.lengths, definition.one_loop)
    package = folder / "package.pt2"
    compile_ahead(program, package)
    text = package.read_text("utf-8")
    return Lowered(text, {kernel: _compiled(kernel, source, folder) for kernel, source in KERNEL.findall(text)})


def _lower_call(name: str, number: int, folder: Path) -> Lowered:
    """A function that a cast hands to be compiled, as ``torch.compile`` makes it for the matrices of a GPU.

    Where Inductor would measure several sizes of blocks, it is the first of them.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cuda.casts import calls_of

    with FakeTensorMode():
        call = calls_of(name, torch.device("cuda", 0))[number]
    text, inputs = _written_for(call)
    kernels = {kernel: _compiled(kernel, source, folder, several=True) for kernel, source in KERNEL.findall(text)}
    return Lowered(text, kernels, inputs)


def _written_for(call: Call) -> tuple[str, tuple[tuple[float, ...], ...]]:
    """The module that Inductor writes where ``compile_any_shape`` compiles a call, and what the module's function takes."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    from narrowgauge._torch.inductor import gpu_options
    from narrowgauge._torch.triton_code import NOT_CACHED, _stopped_at_text

    texts: list[str] = []
    inputs: list[tuple[float, ...]] = []
    named = list(inspect.signature(call.function).parameters)

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        inputs.clear()  # PyTorch begins again where a number of the module turns out to be a constant
        taken = [node.meta for node in graph.graph.nodes if node.op == "placeholder"]
        places = [_place(each["grapharg"].source, named) for each in taken]
        tensors = {n: each["example_value"] for n, each in zip(places, taken, strict=True) if n is not None}
        sides = {str(side): (n, dim) for n, each in tensors.items() for dim, side in enumerate(each.shape)}
        inputs.extend(
            (n,) if n is not None else sides.get(str(each["example_value"])) or _own_number(each)
            for n, each in zip(places, taken, strict=True)
        )
        with config.patch({**gpu_options(), **NOT_CACHED}), _stopped_at_text(texts):
            return compile_fx(graph, examples)

    torch._dynamo.reset()
    with torch.no_grad():
        try:
            torch.compile(call.function, fullgraph=True, dynamic=True, backend=backend)(*call.arguments)
        except Exception:
            if not texts:
                raise
    assert all(inputs), "the module's function takes something else than tensors, their sides and numbers"
    return texts[0], tuple(inputs)


def _own_number(taken: dict[str, Any]) -> tuple[float, ...]:
    """A number of the function's own: a whole one, or a float, which PyTorch makes a float64 tensor without dimensions."""
    value = taken["example_value"]
    if isinstance(value, torch.SymInt):
        return -1, int(value.node.hint)
    return (-2, float(taken["grapharg"].example)) if value.dtype is torch.float64 and not value.ndim else ()


def _place(source: Any, names: list[str]) -> int | None:
    """Which argument a function's graph takes, if it takes a whole one."""
    name = getattr(source, "local_name", None)
    return names.index(name) if name in names else None


def _compiled(name: str, source: str, folder: Path, several: bool = False) -> TritonKernel:
    """A kernel as Inductor would have Triton compile it before the first launch; of ``several`` sizes of blocks the first."""
    import importlib.util

    import triton
    from triton.runtime.driver import driver

    path = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    path.write_text(source, "utf-8")  # Triton reads the source of a function from its file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    tuner = getattr(module, name)
    # Several would be measured against each other: in a step on the weights themselves, so there is one.
    assert several or len(tuner.configs) == 1
    config = tuner.configs[0]
    meta = tuner._create_compile_meta(config)
    options = tuner._create_compile_options(config, meta)
    ast = triton.compiler.ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    made = triton.compile(ast, target=driver.active.get_current_target(), options=options)
    ptx, amdgcn = made.asm.get("ptx", ""), made.asm.get("amdgcn", "")
    if amdgcn:
        resources = _amd_resources(amdgcn)
    else:
        resources = _resources(ptx, made.metadata.target.arch, options["enable_fp_fusion"], folder)
    return TritonKernel(
        name,
        ptx,
        {str(key): str(value) for key, value in meta["signature"].items()},
        {key: int(value) for key, value in config.kwargs.items()},
        int(made.metadata.num_warps),
        int(made.metadata.shared),
        *resources,
        amdgcn,
    )


def _amd_resources(amdgcn: str) -> tuple[int, int, int]:
    """Registers, bytes of scratch memory for a thread, and instructions of a kernel, as its own text says."""
    registers, scratch = (
        re.search(rf"^\s+\.{word}:\s+(\d+)", amdgcn, re.M) for word in ("vgpr_count", "private_segment_fixed_size")
    )
    assert registers is not None and scratch is not None
    return (
        int(registers[1]),
        int(scratch[1]),
        len(re.findall(r"^\s+(?:[vs]|ds|global|buffer|flat|scratch)_\w+", amdgcn, re.M)),
    )


def _resources(ptx: str, capability: int, fuses: bool, folder: Path) -> tuple[int, int, int]:
    """Registers, spilled bytes and instructions of a kernel, as ptxas makes it with the options that Triton gives."""
    from triton.backends.nvidia import compiler

    tool = Path(compiler.get_ptxas(capability).path)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx", dir=folder) as file:
        file.write(ptx)
        file.flush()
        made = f"{file.name}.cubin"
        command = [tool, "-v", *([] if fuses else ["--fmad=false"])]
        command += [f"--gpu-name={compiler.sm_arch_from_capability(capability)}", file.name, "-o", made]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    code = subprocess.run([tool.with_name("nvdisasm"), "-c", made], capture_output=True, text=True, check=True).stdout
    own = re.split(r"^\$.*__cuda_sm", code, maxsplit=1, flags=re.M)[0]
    found = [re.search(pattern, said) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")]
    registers, spills = (int(match[1]) if match else 0 for match in found)
    return registers, spills, len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP)", own, re.M))


def main() -> None:
    from cuda import device

    folder, chip = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TRITON_CACHE_DIR"] = scratch
        device.load_guard(folder)
        device.pretend(device.CHIPS[chip])
        for name in map(str.strip, sys.stdin):
            path = _path(folder, chip, name)
            written = path.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(asdict(_lower(name, Path(scratch)))), "utf-8")
            written.replace(path)
            print("done", flush=True)


if __name__ == "__main__":
    main()
