"""Every row of the table of checks finds, in a loop that runs, what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import narrowgauge as ng
from few_objects import few_objects as few_objects
from narrowgauge.distributed.ranks import Ranks
from narrowgauge.integrations.check import process as process
from narrowgauge.integrations.check.table import CHECKS
from narrowgauge.runs.finding import SEVERITIES

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.randint(0, 32, (6, 9), generator=torch.Generator().manual_seed(0))
Loop = Callable[[Path], ng.Findings]


def language_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32))


def loss_of(model: nn.Module) -> Tensor:
    logits = model(TOKENS[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), TOKENS[:, 1:].flatten())


def train(
    model: nn.Module,
    optimizer: Any,
    *,
    steps: int = 3,
    around: Callable[[], Any] = nullcontext,
    loss: Callable[[nn.Module], Tensor] = loss_of,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
    micro_batches: int = 1,
    zero_grad: dict[str, bool] | None = None,
) -> None:
    """A loop as users write it."""
    for _ in range(steps):
        for _ in range(micro_batches):
            with around():
                value = loss(model)
            value.backward()
        before_step()
        optimizer.step()
        if zero_grad is not None:
            optimizer.zero_grad(**zero_grad)
        after_step()


def watched(model: nn.Module, optimizer: Any, **options: Any) -> ng.Findings:
    with ng.check(model, optimizer) as found:
        train(model, optimizer, **{"zero_grad": {}, **options})
    return found


def prepared(recipe: str = "bfloat16/word", **options: Any) -> tuple[nn.Module, ng.AdamW]:
    return ng.prepare(language_model(), recipe, compile=False, **options)


def torch_adamw(dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = language_model().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **options})


# ── parameters ──────────────────────────────────────────────────────────────────────────────────────────────────────


def missing_parameters(_: Path) -> ng.Findings:
    model = language_model()
    return watched(model, torch.optim.AdamW([*model[0].parameters(), *model[1].parameters()]))


def replaced_parameters(_: Path) -> ng.Findings:
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model[4] = nn.Linear(32, 32)  # a new head of the same size
    return watched(model, optimizer)


def recast_parameters(_: Path) -> ng.Findings:
    model, optimizer = prepared()
    for name, parameter in list(model[1].named_parameters()):  # as PEFT casts an adapter that it loads
        setattr(model[1], name, nn.Parameter(parameter.detach().float()))
    return ng.check(model, optimizer)


def parameters_twice(_: Path) -> ng.Findings:
    model = language_model()
    tied = [p for module in (model, model[4]) for p in module.parameters()]
    return watched(model, torch.optim.AdamW(tied))


def frozen_parameters(_: Path) -> ng.Findings:
    model = language_model()
    model[0].requires_grad_(False)
    return watched(model, torch.optim.AdamW(model.parameters()))


def cast_weights(_: Path) -> ng.Findings:
    model, optimizer = torch_adamw(torch.float32, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    train(model, optimizer, zero_grad={})
    model.bfloat16()
    return ng.check(model, optimizer)


def gradient_format(_: Path) -> ng.Findings:
    model = language_model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    found = ng.check(model, optimizer)
    with found, suppress(RuntimeError):
        train(model, optimizer, zero_grad={})
    return found


def narrow_average(_: Path) -> ng.Findings:
    model, optimizer = torch_adamw()
    average = AveragedModel(model)
    return watched(model, optimizer, after_step=lambda: average.update_parameters(model))


def written_weights(_: Path) -> ng.Findings:
    model, optimizer = prepared()

    @torch.no_grad()
    def renormalize() -> None:
        model[1].weight.mul_(0.5)

    return watched(model, optimizer, after_step=renormalize)


def unnoticed_writes(_: Path) -> ng.Findings:
    model, optimizer = prepared()
    return watched(model, optimizer, after_step=lambda: model[1].weight.data.mul_(0.5))


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def sixteen_bits(_: Path) -> ng.Findings:
    return watched(*torch_adamw(lr=1e-5, weight_decay=0.1))


def eps_underflow(_: Path) -> ng.Findings:
    return watched(*torch_adamw(torch.float16, eps=1e-8))


# ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────────


def autocast_over_narrow(_: Path) -> ng.Findings:
    model, optimizer = prepared()
    return watched(model, optimizer, around=lambda: torch.autocast("cpu", torch.bfloat16))


def second_clipping(_: Path) -> ng.Findings:
    model, optimizer = prepared(max_grad_norm=1.0)
    return watched(model, optimizer, before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def schedule_on_skip(_: Path) -> ng.Findings:
    model, optimizer = prepared(max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)

    def spoil() -> None:
        model[1].weight.grad[0, 0] = torch.inf

    return watched(model, optimizer, before_step=spoil, after_step=schedule.step)


def compiled_twice(_: Path) -> ng.Findings:
    model, optimizer = prepared()
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    return watched(model, optimizer)


def scaled(model: nn.Module, optimizer: Any, scaler: Any, dtype: torch.dtype) -> None:
    for _ in range(3):
        with torch.autocast("cpu", dtype):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def needless_scaler(_: Path) -> ng.Findings:
    model, optimizer = torch_adamw(torch.float32)
    with ng.check(model, optimizer) as found:
        scaled(model, optimizer, torch.amp.GradScaler("cpu", init_scale=8.0), torch.bfloat16)
    return found


def two_scalers(_: Path) -> ng.Findings:
    model, optimizer = prepared("float16/split")
    return ng.check(model, optimizer, scaler=torch.amp.GradScaler("cpu"))


def unscaled_loss(_: Path) -> ng.Findings:
    model, optimizer = prepared("float16/split")
    found = ng.check(model, optimizer)
    with found, pytest.raises(ng.errors.RecipeError):
        train(model, optimizer)
    return found


def missing_scaler(_: Path) -> ng.Findings:
    model, optimizer = torch_adamw(torch.float32)
    return watched(model, optimizer, around=lambda: torch.autocast("cpu", torch.float16))


def narrow_loss(_: Path) -> ng.Findings:
    model, optimizer = prepared()

    def loss(model: nn.Module) -> Tensor:
        value = nn.functional.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())
        return value.float() / 2  # too late

    return watched(model, optimizer, loss=loss)


def narrow_accumulation(_: Path) -> ng.Findings:
    model, optimizer = prepared()
    return watched(model, optimizer, micro_batches=10, steps=1)


def stale_gradients(_: Path) -> ng.Findings:
    model, optimizer = torch_adamw(torch.float32)
    return watched(model, optimizer, zero_grad=None)


def zeroed_gradients(_: Path) -> ng.Findings:
    model, optimizer = torch_adamw(torch.float32)
    return watched(model, optimizer, zero_grad={"set_to_none": False})


# ── the process and its ranks ───────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def setting(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


def default_dtype(_: Path) -> ng.Findings:
    model, optimizer = torch_adamw(torch.float32)
    with setting(torch.set_default_dtype, torch.bfloat16, torch.float32):
        return watched(model, optimizer)


def fast_float32(_: Path) -> ng.Findings:
    with setting(torch.set_float32_matmul_precision, "high", torch.get_float32_matmul_precision()):
        return watched(*torch_adamw(torch.float32))


def flushed_subnormals(_: Path) -> ng.Findings:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    with setting(torch.set_flush_denormal, True, False):
        return ng.check(*torch_adamw(torch.float32))


def reproducible(extra: nn.Module) -> tuple[nn.Module, ng.AdamW]:
    model, optimizer = prepared("bfloat16/word/reproducible")
    model.append(extra)
    return model, optimizer


def tuned_kernels(_: Path) -> ng.Findings:
    model, optimizer = reproducible(nn.Conv1d(32, 32, 1).requires_grad_(False))
    # Its own context: PyTorch's testing package, which some frameworks import, forbids plain assignments.
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, benchmark=True):
        return ng.check(model, optimizer)


def order_bound_modules(_: Path) -> ng.Findings:
    return ng.check(*reproducible(nn.Dropout(0.1)))  # a forward pass of it would be refused


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def cut_by_policy(folder: Path) -> ng.Findings:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with one_rank(folder):
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        model = language_model().bfloat16()
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
        return ng.check(model, ng.AdamW(model.parameters(), storage="word"))


def narrow_rank_sums(folder: Path) -> ng.Findings:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    with one_rank(folder):
        model = nn.parallel.DistributedDataParallel(language_model())
        model.register_comm_hook(None, fp16_compress_hook)
        return watched(model, torch.optim.AdamW(model.parameters()))


def replicas_apart(folder: Path) -> ng.Findings:
    """As the first of two ranks; the second one, whose model another seed has drawn, was there before."""
    with one_rank(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_PATIENCE", timedelta(milliseconds=1))
        first = ng.prepare(language_model(0), "bfloat16/word", compile=False)
        second = ng.prepare(language_model(1), "bfloat16/word", compile=False)
        second[0].load_state_dict(first[0].state_dict())  # as DDP copies
        for rank, (model, optimizer) in ((1, second), (0, first)):
            patch.setattr(process, "all_ranks", partial(Ranks, rank, 2))
            patch.setattr(process, "_calls", count())
            found = ng.check(nn.parallel.DistributedDataParallel(model), optimizer)
            if rank == 0:
                return found
            assert not found  # whoever is alone knows nothing
    raise AssertionError


def narrow_matmul_sums(_: Path) -> ng.Findings:
    if not torch.cuda.is_available():
        pytest.skip("partial sums in bfloat16 are a setting of CUDA's matmuls")
    model = language_model().to("cuda", torch.bfloat16)
    return ng.check(model, ng.AdamW(model.parameters()))


OF_NARROW = ("lost-updates", "rate-below-spacing", "frozen-second-moment", "swallowed-decay", "sensitive-modules")
PROVOKED: dict[str, Loop] = {
    "missing-parameters": missing_parameters,
    "replaced-parameters": replaced_parameters,
    "recast-parameters": recast_parameters,
    "parameters-twice": parameters_twice,
    "frozen-parameters": frozen_parameters,
    "cast-weights": cast_weights,
    **dict.fromkeys(OF_NARROW, sixteen_bits),
    "eps-underflow": eps_underflow,
    "gradient-format": gradient_format,
    "narrow-average": narrow_average,
    "written-weights": written_weights,
    "unnoticed-writes": unnoticed_writes,
    "autocast-over-narrow": autocast_over_narrow,
    "second-clipping": second_clipping,
    "schedule-on-skip": schedule_on_skip,
    "compiled-twice": compiled_twice,
    "needless-scaler": needless_scaler,
    "two-scalers": two_scalers,
    "unscaled-loss": unscaled_loss,
    "missing-scaler": missing_scaler,
    "narrow-loss": narrow_loss,
    "narrow-accumulation": narrow_accumulation,
    "stale-gradients": stale_gradients,
    "zeroed-gradients": zeroed_gradients,
    "default-dtype": default_dtype,
    "fast-float32": fast_float32,
    "narrow-matmul-sums": narrow_matmul_sums,
    "flushed-subnormals": flushed_subnormals,
    "tuned-kernels": tuned_kernels,
    "cut-by-policy": cut_by_policy,
    "narrow-rank-sums": narrow_rank_sums,
    "order-bound-modules": order_bound_modules,
    "replicas-apart": replicas_apart,
}
# What a loop that is wrong in one way is wrong in besides: each has torch's optimizers over 16-bit weights.
FOLLOWS: dict[str, set[str]] = {
    **{name: set(OF_NARROW) for name in (*OF_NARROW, "narrow-average", "cast-weights", "gradient-format")},
    "eps-underflow": {*OF_NARROW, "missing-scaler"},
}


def test_every_row_is_provoked() -> None:
    assert set(PROVOKED) == set(CHECKS)
    assert {row.severity for row in CHECKS.values()} == set(SEVERITIES)


@pytest.mark.parametrize("name", PROVOKED)
def test_a_row_finds_what_it_says_and_nothing_else(name: str, tmp_path: Path) -> None:
    found = PROVOKED[name](tmp_path)
    assert not found.is_watching
    assert {each.name for each in found} - FOLLOWS.get(name, set()) | {name} == {name}
    finding = next(each for each in found if each.name == name)
    assert finding.severity == CHECKS[name].severity and finding.where and finding.message.endswith(".")
    assert "{" not in finding.message + finding.advice.replace("{p: values}", "") and found.ok is (
        finding.severity == "note"
    )
