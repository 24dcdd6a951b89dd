"""nanotron's own classes on a CPU: its optimizer wrapper around ours, by the lines of the page, and
its parallel layers. Its trainer needs a GPU.

nanotron 0.4 of PyPI cannot be imported (its modules import each other in a circle), so no extra
installs it. A checkout can be: ``PYTHONPATH=nanotron/src ./dev test --frameworks
tests/integrations/test_nanotron.py``, beside the package dacite.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng

named_optimizer = pytest.importorskip("nanotron.optim.named_optimizer", exc_type=ImportError)
layers = pytest.importorskip("nanotron.parallel.tensor_parallel.nn", exc_type=ImportError)

pytestmark = pytest.mark.frameworks

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("nanotron") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture
def wrapper() -> Any:
    """Return the class of the page."""
    text = PAGE.read_text(encoding="utf-8")
    code = re.search(r"^class Named\(.*?(?=^def )", text, re.DOTALL | re.MULTILINE)
    assert code is not None
    names: dict[str, Any] = {"NamedOptimizer": named_optimizer.NamedOptimizer}
    exec(code[0], names)
    return names["Named"]


def parallel(group: Any) -> nn.Module:
    torch.manual_seed(0)
    mode = layers.TensorParallelLinearMode.ALL_REDUCE
    options = {"pg": group, "mode": mode, "dtype": torch.bfloat16}
    column = layers.TensorParallelColumnLinear(64, 128, **options)
    row = layers.TensorParallelRowLinear(128, 64, **options)
    return nn.Sequential(column, nn.GELU(), row)


def plain(model: nn.Module) -> nn.Module:
    copy = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()
    copy.load_state_dict(model.state_dict())
    return copy


def build(groups: Any) -> torch.optim.Optimizer:
    return ng.AdamW(groups, lr=1e-3, storage="word", max_grad_norm=1.0)


def step(model: nn.Module, optimizer: Any, batch: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(32, 64, generator=generator).bfloat16()
    (model(x).float() - x.sin()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_steps_and_a_resume_have_the_bits_of_a_plain_loop(group: Any, wrapper: Any) -> None:
    model = parallel(group)
    assert {type(weight).__name__ for weight in model.parameters()} == {"NanotronParameter"}
    copy = plain(model)
    optimizer = wrapper(list(model.named_parameters()), build)
    reference = build(copy.parameters())
    for batch in range(3):
        step(model, optimizer, batch)
        step(copy, reference, batch)
    saved = optimizer.state_dict()
    assert sorted(saved["names"].values()) == sorted(name for name, _ in model.named_parameters())
    resumed = parallel(group)
    resumed.load_state_dict(model.state_dict())
    optimizer = wrapper(list(resumed.named_parameters()), build)
    optimizer.load_state_dict(saved)
    for batch in range(3, 6):
        step(resumed, optimizer, batch)
        step(copy, reference, batch)
    for ours, theirs in zip(resumed.parameters(), copy.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_its_layers_stay_wide_and_are_named(group: Any) -> None:
    """They gather and reduce inside a forward pass of their own, which is not replaced."""
    model = nn.ModuleDict({"mlp": parallel(group), "out": nn.Linear(64, 64).bfloat16()})
    with pytest.warns(UserWarning, match="TensorParallelColumnLinear"):
        linears = ng.swap_linears(model, "float8-row")
    assert set(linears.layers) == {"out"}
