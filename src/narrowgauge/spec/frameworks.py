"""Checkpoints of other libraries: which are read and written, what is exact, what is refused and why. One row per format.

``conversion`` reads by these rows, the documentation prints them, and the tests go through all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TESTED_TORCH = ("2.11", "2.13", "2.15")
"""The releases of PyTorch that the tests run with: the oldest that can be installed with this package, the one that ``./dev``
installs, and the newest. Tests hold the workflow, ``pyproject.toml``, ``constraints.txt`` and the documentation to it.
"""


def untested_torch(version: str) -> str:
    """What to tell a user of a release of PyTorch newer than those tested; empty where there is nothing to tell.

    Example:
        >>> untested_torch("2.15.1+cpu"), untested_torch("2.9.0")
        ('', '')
        >>> untested_torch("3.0.0a0").partition(":")[0]
        'narrowgauge was tested with PyTorch 2.11 to 2.15, and this is 3.0.0a0'
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) <= tuple(map(int, TESTED_TORCH[-1].split("."))):
        return ""
    return (
        f"narrowgauge was tested with PyTorch {TESTED_TORCH[0]} to {TESTED_TORCH[-1]}, and this is {version}: compiled kernels "
        "are compared with their definitions here before they are used; what else is new in it nobody has tried."
    )


def installed_version(package: str) -> str | None:
    """The version of a package, which is not imported; ``None`` where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Framework:
    """A format of checkpoints.

    Args:
        name: as in conversion reports.
        version: whose source or files it was checked against.
        writes: what ``convert --like`` writes; empty: nothing.
        exact: what reading rounds.
        refused: what is refused, and why.
        checked: how this is tested.
    """

    name: str
    version: str
    reads: str
    writes: str
    exact: str
    refused: str
    checked: str


_PLACE = "weights, moments and step count, in a copy of a checkpoint of the same model"

FRAMEWORKS: dict[str, Framework] = {
    row.name: row
    for row in (
        Framework(
            "torch.optim",
            f"torch {TESTED_TORCH[0]} – {TESTED_TORCH[-1]}",
            "Adam and AdamW, alone or in files of Lightning, Accelerate and the Hugging Face Trainer",
            "",
            "nothing",
            "other optimizers and amsgrad, whose state is not Adam's; several optimizers in a file; unnamed states of weights "
            "whose order is unknown (--names tells it)",
            "files that torch writes",
        ),
        Framework(
            "bitsandbytes",
            "0.50",
            "Adam and AdamW, 8-bit block-wise and 32-bit",
            "",
            "nothing: a code is one float32",
            "8-bit states that are not block-wise, which bitsandbytes no longer writes",
            "files laid out after its formula",
        ),
        Framework(
            "torchao",
            "0.18.0",
            "Adam and AdamW, 8-bit, 4-bit and float8",
            "",
            "nothing: a code is one float32",
            "amsgrad; sharded states, which are DTensors: save them with get_optimizer_state_dict(full_state_dict=True)",
            "files that torchao wrote, values as it dequantizes them",
        ),
        Framework(
            "FlashOptim",
            "0.1.4",
            "FlashAdam and FlashAdamW, compressed or not, with 24- and 32-bit masters",
            "",
            "nothing: the values that its kernels compute",
            "FlashLion and FlashSGD, whose state is not Adam's",
            "codes and values of its kernels, in Triton's interpreter",
        ),
        Framework(
            "optimi",
            "0.3.3",
            "Adam, AdamW and RAdam, with Kahan summation or without",
            "",
            "moments once to float32: optimi stores them divided by their bias correction; weight plus compensation once",
            "StableAdamW, Ranger and Adan, whose states hold more than two moments; Lion and SGD, which hold one",
            "files that optimi wrote",
        ),
        Framework(
            "FusedAdam",
            "TransformerEngine at d0067d0, Apex",
            "optimizer.state_dict(): float32 moments, also of float16 and float8 ones, which it unscales on saving; "
            "TransformerEngine's masters of float32 or as 16-bit remainders (Apex's state_dict leaves masters out)",
            "",
            "nothing: a remainder and the bfloat16 weight are the float32, as in our storage exact",
            "a pickled optimizer object with Float8Tensors, whose code is not run: save state_dict()",
            "files laid out after its source; it needs CUDA",
        ),
        Framework(
            "DeepSpeed ZeRO",
            "0.19.8",
            "stages 1, 2 and 3, of any number of ranks; elastic checkpoints",
            _PLACE,
            "nothing",
            "tensor and pipeline parallelism and experts, whose files only the model can join; frozen parameters; writing "
            "another step count than the copy's where it is a number in a pickle (FusedAdam, CPUAdam)",
            "files that DeepSpeed wrote on two ranks, against its zero_to_fp32; written ones are loaded by it",
        ),
        Framework(
            "Megatron-Core",
            "Megatron-LM at d98e8a6",
            "torch_dist with fully_reshardable or fully_sharded_model_space optimizer, of any parallelism; layers one by one",
            _PLACE,
            "nothing",
            "dp_reshardable, and distrib_optim.pt of the torch format: flat buckets, whose layout is the running model's and is "
            "not saved; fsdp_dtensor; writing another step count than the copy's, which is a number in a pickle",
            "files laid out after its source, written by torch's DCP; it needs CUDA",
        ),
        Framework(
            "nanotron",
            "at 2411b02, checkpoint version 1.5",
            "weights and AdamW, of any tensor, pipeline and ZeRO-1 parallelism",
            _PLACE,
            "nothing",
            "experts divided over ranks; writing parameters that join several slices (QKV) under tensor parallelism",
            "files laid out after its source; it needs CUDA",
        ),
    )
}
