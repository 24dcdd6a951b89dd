"""The files of this folder: checkpoints that the packages themselves wrote, and fingerprints of the
values they read in them.

``PYTHONPATH=… TORCHDYNAMO_DISABLE=1 python make.py`` with torchao 0.18.0 on a CPU.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.json"


def fingerprint(values: Tensor) -> str:
    return hashlib.sha256(values.detach().float().contiguous().numpy().tobytes()).hexdigest()[:16]


def expect(name: str, values: dict[str, Tensor]) -> None:
    fingerprints = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    fingerprints[name] = {key: fingerprint(value) for key, value in values.items()}
    EXPECTED.write_text(json.dumps(fingerprints, indent=1, sort_keys=True) + "\n")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(64, 64)
        self.small = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.big(x).tanh())


def trained(
    optimizer_of: Any, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Small().to(dtype)
    optimizer = optimizer_of(model.parameters())
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(5, 64, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(name: str, model: nn.Module, state: Any) -> None:
    torch.save({"model": model.state_dict(), "optimizer": state}, HERE / f"{name}.pt")


def torchao() -> None:
    from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

    for kind, name in (
        (AdamW8bit, "torchao-8bit"),
        (AdamW4bit, "torchao-4bit"),
        (AdamWFp8, "torchao-fp8"),
    ):
        model, optimizer = trained(lambda p, kind=kind: kind(p, lr=1e-2))
        save(name, model, optimizer.state_dict())
        weight = model.big.weight
        entry = optimizer.state[weight]
        expect(
            name,
            {key: entry[key].dequantize() for key in ("exp_avg", "exp_avg_sq")}
            | {"weight": weight},
        )


if __name__ == "__main__":
    torchao()
