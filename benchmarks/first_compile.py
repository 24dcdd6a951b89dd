"""What compiling costs: the first steps of a first process, and of the second.

Claim: everything that an optimizer needs (the step, the audited step, the two passes of the gradient norm) is compiled
in at most 15 s, once per machine, and comes from the disk in every later process. Each process builds ``word`` over the
tensors of a llama-125m with clipping, takes steps until all kernels have run, and takes one more.

Baseline: that last step, which compiles nothing. Two ways: as ``ng.AdamW`` decides itself (the few vectors of this
model run eagerly), and with ``compile=True`` (their kernels too). Our cache and PyTorch's are folders made for the run,
empty for the first process and kept for the second.

Run: ``./dev bench first_compile [--quick]``. ``--rounds`` first processes are tried of each way.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from timing import Report, Row, parser

WAYS = {"as it decides": None, "compile=True": True}
STEPS = 3
"""Audited every second step: the first runs the plain kernel and the norm, the second the audited one."""


def child(model: str, compile: bool | None, num_threads: int | None) -> Row:
    """What one process measures of itself; importing PyTorch is not counted."""
    import torch
    from optimizer_step import OPTIONS, make_parameters, model_shapes

    import narrowgauge as ng

    if num_threads:
        torch.set_num_threads(num_threads)
    parameters = make_parameters(model_shapes(model), torch.bfloat16)
    optimizer = ng.AdamW(parameters, **OPTIONS, storage="word", max_grad_norm=1.0, audit_every=2, compile=compile)
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    packages = list(Path(os.environ["NARROWGAUGE_CACHE"], "kernels").glob("*.pt2"))
    size = sum(p.stat().st_size for p in packages)
    return {"seconds": seconds, "packages": len(packages), "package_bytes": size}


def process(folder: Path, model: str, way: str, num_threads: int | None) -> Row:
    """Run :func:`child` in a process whose caches lie in ``folder``."""
    environment = {**os.environ, "NARROWGAUGE_CACHE": str(folder / "ours")}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"), "TRITON_CACHE_DIR": str(folder / "triton")}
    command = [sys.executable, __file__, "--child", model, json.dumps(WAYS[way]), json.dumps(num_threads)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: Row = json.loads(done.stdout.splitlines()[-1])
    return result


def rows_of(model: str, way: str, rounds: int, num_threads: int | None) -> list[Row]:
    """First and second processes of one way."""
    first, second = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            first.append(process(Path(folder), model, way, num_threads))
            second.append(process(Path(folder), model, way, num_threads))
    return [_row(f"{way}, first process", first), _row(f"{way}, from the cache", second)]


def _row(name: str, results: list[Row]) -> Row:
    def median(step: int) -> float:
        return statistics.median(float(r["seconds"][step]) for r in results)

    return {
        "": name,
        "first step s": median(0),
        "first audited step s": median(1),
        "next step s": median(2),
        "beyond plain steps s": statistics.median(sum(r["seconds"][:2]) - 2 * r["seconds"][2] for r in results),
        "ratio of first step to next": statistics.median(r["seconds"][0] / r["seconds"][2] for r in results),
        "packages": results[-1]["packages"],
        "MB": results[-1]["package_bytes"] / 1e6,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=3).parse_args(arguments)
    report = Report("first compile", options)
    model, rounds = ("llama-1m", 1) if options.quick else ("llama-125m", options.rounds)
    rows: list[Row] = []
    for way in list(WAYS)[:1] if options.quick else WAYS:
        rows += rows_of(model, way, rounds, options.threads)
    report.add(f"word, {model}, clipped, audited", rows)
    return report.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4]))))
    else:
        sys.exit(main())
