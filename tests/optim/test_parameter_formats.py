"""The model that people have: float32, 16-bit and mixed parameters, rounded in place where a
storage holds 16 bits.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import narrowgauge as ng
from optim.pairs import parameters, step_along
from tensors import parameters_of
from text.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:Rounded:UserWarning")


class Model(nn.Module):
    """A classifier of tokens, so that its layers take each other's formats."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.head = nn.Linear(8, 32), nn.Linear(32, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.up(self.norm(self.embedding(tokens))).relu()).float()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(torch.arange(16)), torch.arange(16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_mixed_formats_step_as_in_optimizers_of_their_own():
    """bfloat16 under ``word``, float16 in its counterpart, float32 that stays: by group, frozen at
    first.
    """
    weights = []
    alone = []
    for storage in ("word", "float16/split", "float32", "float32"):
        weights += parameters(storage, [(6, 4)])
        alone.append(ng.AdamW(parameters(storage, [(6, 4)]), storage=storage, low_bits="zero"))
    weights[2].requires_grad_(False)
    groups = [{"params": weights[:3]}, {"params": weights[3:], "storage": "float32"}]
    optimizer = ng.AdamW(groups, low_bits="zero")
    weights[2].requires_grad_()
    for stepped in (optimizer, *alone):
        step_along(stepped, 0.3)
        step_along(stepped, 1.3)
    for p, separate in zip(weights, alone, strict=True):
        (q,) = parameters_of(separate)
        assert torch.equal(optimizer.stored(p), separate.stored(q))
        assert optimizer.storage_of(p) == separate.storage_of(q)


def test_tied_strided_frozen_weights_and_gradients_that_exist():
    model = Model()
    model.head.weight = nn.Parameter(torch.randn(32, 16).t())  # by columns, as channels_last is
    model.up.weight = nn.Parameter(torch.randn(32, 8))
    model.embedding.weight.grad = torch.ones(16, 8)
    model.norm.weight.requires_grad_(False)
    model.register_parameter("tied", model.up.weight)
    optimizer = ng.AdamW(model.parameters(), lr=1e-2)
    optimizer.step()
    assert model.tied is model.up.weight and model.head.weight.stride() == (1, 16)
    assert model.norm.weight.dtype is torch.float32
    assert model.embedding.weight.dtype is torch.bfloat16
    unfrozen = Model().norm.weight
    optimizer.add_param_group({"params": [unfrozen]})
    assert unfrozen.dtype is torch.bfloat16


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("wrap", "storage", "row"),
    [
        (nn.parallel.DistributedDataParallel, "word", "float32-states8"),
        (fsdp2, "exact", "float32"),
        (fsdp1, "word", "float32-states8"),
    ],
)
def test_parameters_that_a_wrapper_holds_stay_in_float32(wrap, storage, row):
    """One line trains them in the usual order. The warning says what it costs."""
    model = wrap(Model())
    theirs = wrap(Model())
    with pytest.warns(
        UserWarning, match=f"Kept float32 weights as they are.* '{row}' takes"
    ) as told:
        optimizer = ng.AdamW(model.parameters(), lr=1e-2, storage=storage)
    assert [warning.filename for warning in told] == [__file__]
    assert {group["storage"] for group in optimizer.param_groups} == {row}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]
    reference = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2))
    assert losses == pytest.approx(reference, abs=0.02)


@pytest.mark.usefixtures("one_rank")
def test_a_matrix_rule_keeps_float32_moments_of_float32_weights():
    with pytest.warns(UserWarning, match="'float32' takes"):
        ng.Muon(Model().parameters(), adjust_lr_fn="match_rms_adamw")


def test_a_warning_names_the_line_that_called():
    with pytest.warns(UserWarning, match="Rounded") as told:
        optimizer = ng.AdamW([nn.Parameter(torch.ones(4, 4))])
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert [warning.filename for warning in told] == 2 * [__file__]


def test_an_optimizer_that_adopts_the_weights_of_an_earlier_one_begins_with_them():
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    before = model.weight.detach().clone()
    with pytest.warns(UserWarning, match="Rounded 4,160 float32 weights .* of 'exact'"):
        first = ng.AdamW([{"params": model.parameters(), "storage": "exact"}])
    assert torch.equal(first.stored(model.weight), before)
    second = ng.AdamW(model.parameters(), storage="exact")
    second.adopt({p: first.stored(p) for p in model.parameters()})
    assert torch.equal(second.stored(model.weight), before)
    third = ng.AdamW(model.parameters(), storage="exact")
    assert not third.state and torch.equal(third.stored(model.weight), model.weight.float())


def test_a_module_keeps_its_batch_norms_in_float32():
    """PyTorch multiplies one format only: under autocast the forward pass once failed."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = ng.AdamW(model, lr=1e-3)
    assert {p.dtype for p in [*model[0].parameters(), *model[2].parameters()]} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(4, 8)).float().square().mean()
    loss.backward()
    optimizer.step()
    gain = model[1].weight
    assert gain.dtype is torch.float32 and not torch.equal(gain, torch.ones(8))


def test_an_averaged_model_runs_whatever_else_the_model_holds():
    """Statistics of batch norms in bfloat16, codes of a quantized base, complex weights."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.register_parameter(
        "codes", nn.Parameter(torch.arange(3, dtype=torch.uint8), requires_grad=False)
    )
    model.register_parameter("phases", nn.Parameter(torch.full((2,), 1j)))
    optimizer = ng.AdamW(ng.cast_parameters(model, torch.bfloat16)[:2].parameters(), compile=False)
    average = ng.AveragedModel(model, optimizer, decay=0.5)
    model.codes.data += 1
    model[1].running_mean.add_(1.0)
    for _ in range(2):
        average.update_parameters(model)
        model.phases.data *= 3
    assert average.eval()(torch.randn(4, 8)).dtype is torch.float32
    assert torch.equal(average.module.codes, model.codes)
    assert torch.equal(average.module[1].running_mean, model[1].running_mean)
    assert torch.equal(average.module.phases.detach(), torch.full((2,), 2j))


def test_an_average_without_its_model_is_refused():
    """A copy of the average holds a copy of the optimizer, which steps other weights than the
    model's.
    """
    model = nn.Linear(8, 8)
    average = ng.AveragedModel(model, ng.AdamW(model.parameters()))
    copied = copy.deepcopy(average)
    with refused("an average of another model"):
        copied.update_parameters(model)
    copied.optimizer = average.optimizer
    copied.update_parameters(model)
