"""The processor, versions, variables and switches on which the bits of PyTorch's arithmetic depend."""

from __future__ import annotations

import os
import re

import torch

from narrowgauge.spec.processor import instruction_sets, processor_name

_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip
# Those by which the libraries choose their kernels.
_SETS = (
    "sse4_2", "avx", "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8",
    "asimd", "bf16", "sve", "sve2",
)  # fmt: skip
_LIBRARIES = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"MKL-DNN v(\S+)"}


def settings_in_force(device: torch.device) -> dict[str, str]:
    """Everything by which a measured arithmetic is looked up again, and to which its differences are traced.

    Args:
        device: whose arithmetic it is.
    Returns:
        Texts by name; variables only where they are set.
    Cost: less than a millisecond.
    Example:
        >>> settings_in_force(torch.device("cpu"))["torch"] == torch.__version__
        True
    """
    built_with = torch.__config__.show()
    libraries = {name: re.search(pattern, built_with) for name, pattern in _LIBRARIES.items()}
    sets = instruction_sets()
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": processor_name(),
        "instruction sets": " ".join(name for name in _SETS if name in sets) or "unknown",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        **{name: found[1] for name, found in libraries.items() if found},
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()).lower(),
        # No function tells: a product does.
        "subnormals set": "flushed" if float(torch.tensor(2.0**-100, dtype=torch.float32) * 2.0**-40) == 0 else "kept",
        **(_cuda_settings() if device.type == "cuda" else {}),
        **{name: os.environ[name] for name in _VARIABLES if os.environ.get(name)},
    }


def _cuda_settings() -> dict[str, str]:
    reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    return {
        "cuda": str(torch.version.cuda or torch.version.hip),
        "cudnn": str(torch.backends.cudnn.version()),
        "reduced sums of bfloat16": str(reduced).lower(),
    }
