"""The checks and benchmarks on CUDA: first that every bit is right, then how fast it is.

Claim: the kernels compiled for a GPU give the same bits as the definition run eagerly on a CPU, for every storage, elementwise
rule and sum of micro-batches; the stall case reads the same; and a step moves its bytes at nearly the rate of a plain copy. Bytes
per element: the visible weight read and written, the gradient read, every state read and written (``word`` 14, a float32 AdamW
28). Cases: a llama-1b's tensors, and 300 small ones. Every cast of the table of computes gives the CPU's bits too, along both
dimensions; every product, native or emulated, is within its stated bound of the float64 product of its operands; every row
trains; and a training that gauges watch has the bits of one that they do not; so has one on two ranks, beside one on one.
How fast the narrow layers and whole steps must be is stated in ``narrow_linear.py`` and ``narrow_training.py``.

Baseline: ``torch.optim.AdamW(fused=True)`` in float32 for the ratio, and a copy of 1 GiB on the device (read and written) for
the share of the bandwidth; bfloat16, compiled, for layers and whole steps. Beside ours the optimizers of ``peers.py``,
FlashOptim's and TransformerEngine's, and torchao's layers; one that is not installed or cannot run says why.

Run: ``./dev gpu [--sections …] [--quick] [--minutes 20] [--json FILE]``; without a network, ``PYTHON=python3.12 ./dev gpu``,
which installs nothing and takes the PyTorch that is there. Tables are Markdown, for the log. A failed check ends with status 1,
and nothing is timed; without a GPU, status 2. What has not begun after the minutes is left out, and named.

``./dev gpu --rehearse`` does the same on a CPU in the GPU's place, at the sizes of ``--quick``, and tests do so: a renamed
function is noticed there. What they cannot rehearse: a launch for many tensors, which ``tests/cuda`` runs on arrays; the
native float8 products; NCCL; and the peers, where they are not installed.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from _gpu_setting import FULL, QUICK, Setting, Tables
from peers import CUDA_PEERS, PACKAGES, reason
from timing import Report, parser

from narrowgauge.errors import ChipError
from narrowgauge.matmul.gemm import EmulationNotice

CHECKED = {
    "storages": "_gpu_optimizers.check_storages",
    "casts": "_gpu_matmuls.check_casts",
    "products": "_gpu_matmuls.check_products",
    "ranks": "gpu_ranks.check_ranks",
    "gauges": "_gpu_training.check_gauges",
    "training": "_gpu_training.check_training",
}
TIMED = {
    "steps": "_gpu_optimizers.time_steps",
    "layers": "_gpu_matmuls.time_layers",
    "models": "_gpu_training.time_models",
}
"""The sections; each is imported when it is its turn, so that one that lacks a package leaves the others."""
SECTIONS = (*CHECKED, *TIMED)


def require_device() -> None:
    """Stop where there is no GPU.

    Raises:
        ChipError: no CUDA device is here.
    """
    if not torch.cuda.is_available():
        raise ChipError(
            f"./dev gpu needs a CUDA device, and PyTorch {torch.__version__} finds none here.",
            "./dev gpu --rehearse runs the same on the CPU; ./dev test and ./dev bench check and measure it.",
        )


def section(place: str) -> Callable[..., object]:
    """The function of a section."""
    module, _, name = place.partition(".")
    found: Callable[..., object] = getattr(import_module(module), name)
    return found


def check(setting: Setting, names: Sequence[str]) -> bool:
    """All checks of correctness that were requested; whether they pass."""
    passed = True
    for name in setting.in_time("sections", names):
        try:
            tables: Tables = section(CHECKED[name])(setting)  # type: ignore[assignment]
            for title, rows in tables:
                setting.report.add(title, rows)
                passed &= all(row["passes"] in ("yes", "not run") for row in rows)
        except ModuleNotFoundError as error:
            setting.report.add(name, [{"passes": "not run", "why": f"{error.name} is not installed"}])
        except Exception as error:  # the other sections are to be checked
            traceback.print_exc()
            setting.report.add(name, [{"passes": "NO", "why": reason(error)}])
            passed = False
    return passed


def time_all(setting: Setting, names: Sequence[str], rounds: int) -> bool:
    """All that is to be timed; whether each section ran."""
    ran = True
    for name in setting.in_time("sections", names):
        try:
            section(TIMED[name])(setting, rounds)
        except Exception as error:  # the other sections are to be timed
            traceback.print_exc()
            setting.report.note(f"{name} {reason(error)}")
            ran = False
    return ran


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, then measure."""
    flags = parser(__doc__, rounds=25)
    listed = ", ".join(SECTIONS)
    flags.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="NAME", help=listed)
    flags.add_argument("--minutes", type=float, default=20, help="after which nothing new begins (default 20)")
    flags.add_argument("--rehearse", action="store_true", help="the CPU in the place of the GPU, with --quick's sizes")
    options = flags.parse_args(arguments)
    options.quick |= options.rehearse
    try:
        if not options.rehearse:
            require_device()
    except ChipError as error:
        print(f"ChipError: {error}", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore", EmulationNotice)
    packages = ("triton", *PACKAGES, *(peer.package for peer in CUDA_PEERS))
    report = Report("gpu", options, packages, markdown=True)
    device = torch.device("cpu" if options.rehearse else "cuda")
    setting = Setting(device, QUICK if options.quick else FULL, report, options.minutes)
    if not check(setting, [name for name in options.sections if name in CHECKED]):
        report.note("a check failed, so nothing was timed")
        report.end()
        return 1
    rounds = (2 if options.rehearse else 5) if options.quick else options.rounds
    ran = time_all(setting, [name for name in options.sections if name in TIMED], rounds)
    return report.end() or int(not ran)


if __name__ == "__main__":
    sys.exit(main())
