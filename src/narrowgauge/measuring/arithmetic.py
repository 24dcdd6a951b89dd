"""This machine's arithmetic: hashes of the bits that some operations give on fixed numbers.

Two correct machines may differ in their last bits, and so may one machine under two settings. They
add in another order, fuse a multiplication with an addition, or round a function differently. Each
operation is a probe.

The numbers are made from integers alone, so they are equal on every machine. No random number is
drawn and no setting changed.
"""

import hashlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def fixed_numbers() -> Tensor:
    """Return float32 ``[64, 1024]`` in (-1, 1) without a pattern, with too many bits for exact
    sums; on the CPU.
    """
    state = torch.arange(1, 64 * 1024 + 1, device="cpu")
    for _ in range(3):
        state = (state * 48271 + 69621) % (2**31 - 1)
    return (((state % 2**20).double() / 2**19 - 1) ** 3).float().view(64, 1024)


def _multiply_add(x: Tensor) -> Tensor:
    x = _odd(x)
    y = x.flip(0)
    return torch.stack(
        [torch.addcmul(y, x, x), torch.addcdiv(y, x, y.abs() + 0.75), torch.lerp(y, x, x)]
    )


def _attention(x: Tensor) -> Tensor:
    heads = x.view(1, 1, 1024, 64)
    return F.scaled_dot_product_attention(heads[:, :, :16], heads, heads.flip(2))


def _odd(x: Tensor) -> Tensor:
    """Return 4,099 elements.

    A vector's width does not divide this, and kernels may round the last ones differently.
    """
    return x.flatten()[:4099]


PROBES: dict[str, Callable[[Tensor], Tensor]] = {
    "subnormals": lambda x: x * 2.0**-100 * 2.0**-40,
    "fused multiply-add": _multiply_add,
    "function sigmoid": lambda x: (20 * _odd(x)).sigmoid(),
    "function silu": lambda x: F.silu(20 * _odd(x)),
    "function gelu": lambda x: F.gelu(8 * _odd(x)),
    "layer norm": lambda x: F.layer_norm(x, [1024]),
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: x.view(16, 4096).log_softmax(-1),
    "linear float32": lambda x: F.linear(x, x),
    "attention": _attention,
    "sum of a tensor": lambda x: x.sum(),
}
"""Each operation by its name. It takes the fixed numbers on the measured device."""


def measure_arithmetic(device: torch.device) -> dict[str, str]:
    """Measure the arithmetic of a device under the present settings: the table ``arithmetic`` of
    ``run.toml``.

    Cost: about 10 ms on a CPU.
    Example:
        >>> measure_arithmetic(torch.device("cpu")).keys() == PROBES.keys()
        True
    """
    results = {}
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        x = fixed_numbers().to(device)
        for name, probe in PROBES.items():
            bits = probe(x).contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
            results[name] = f"bits #{hashlib.sha256(bits).hexdigest()[:8]}"
    return results
