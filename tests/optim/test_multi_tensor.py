"""One launch steps all tensors, with the bits of the definition. Triton's interpreter runs the kernels of a GPU on this CPU."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowgauge as ng
from narrowgauge import torch_names, triton_printer
from narrowgauge.numerics import multi_tensor_squares
from narrowgauge.numerics.exact_sums import exact_squares
from narrowgauge.optim import clip, multi_tensor
from narrowgauge.optim.rules import matrix
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.state import ParameterState
from narrowgauge.spec.storages import STORAGES
from optim.pairs import PAIRS, RULES, build, everything, parameters
from script_modules import benchmark_module
from tensors import assert_same_bits, gaussian

pytest.importorskip(
    "triton", reason="the kernels of a GPU are printed for Triton, which is not installed"
)
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # NumPy's, of infinities in the interpreter

CPU = torch.device("cpu")
# Nesterov's momentum is a scalar of "sgd". A user's own rule meets one storage of each kind. So do matrix rules but Muon: their
# states have shapes of their own, and only the decay is left.
OWN = ("word", "compact", "float16/split")
KERNELS = [
    (rule, storage)
    for rule, storage in PAIRS
    if STORAGES[storage].arithmetic != "float64"
    if rule != "nesterov"
    and (rule not in ("own", "adafactor", "galore", "gradnorm_lorp") or storage in OWN)
]
FEW = [
    ("adamw", "word"),
    ("adam", "compact"),
    ("lion", "float32-states8"),
    ("adamw", "float16/collage-plus"),
]
FEW += [("muon", "word"), ("galore", "compact"), ("adafactor", "exact"), ("gradnorm_lorp", "kahan")]


def kernel_of(rule: str, storage: str) -> tuple[Any, Any]:
    row = build(rule, parameters(storage, [(2, 2)]), storage).rule
    return row, STORAGES[storage].keeping(row.kept)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps of compiled optimizers run as on a GPU. Blocks are small, so that there are several."""
    monkeypatch.setattr(triton_printer, "INTERPRET", True)
    monkeypatch.setattr(multi_tensor, "BLOCK", 32)
    monkeypatch.setattr("narrowgauge.optim.kernel.compiled", lambda *args, **options: None)
    caches = multi_tensor.functions, multi_tensor.is_proven, matrix._multiplies_stacks
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(("rule", "storage"), KERNELS)
def test_the_printed_kernel_has_the_bits_of_the_definition(rule: str, storage: str) -> None:
    """Ordinary and edge values, infinities, NaNs, odd ends."""
    assert multi_tensor.is_proven(*kernel_of(rule, storage), CPU, False)


def unaligned(shape: tuple[int, ...], values: Tensor) -> Tensor:
    """A copy that begins 2 (or 4) bytes after an aligned address."""
    copy = torch.empty(values.numel() + 1, dtype=values.dtype)[1:].view(shape)
    return copy.copy_(values)


def train(
    rule: str, storage: str, *, compiled: bool, steps: int = 5, **options: Any
) -> ng.Optimizer:
    """Steps of two groups, with unequal counts, an infinity, a NaN, odd ends and addresses, no elements, other strides."""
    triton_printer.INTERPRET = compiled
    dtype = getattr(torch, STORAGES[storage].visible)
    shapes: list[tuple[int, ...]] = [(4, 72), (8, 8), (3, 7), (9,), (0, 4), (4, 16), (16, 8)]
    params = []
    for k, shape in enumerate(shapes):
        values = gaussian(*shape, seed=k, dtype=dtype)
        params.append(nn.Parameter(unaligned(shape, values) if k == 5 else values))
    params[6].data = params[6].detach().t().contiguous().t()
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.02}]
    optimizer = RULES[rule].make(
        groups, storage=storage, compile=compiled, **{**RULES[rule].options, "lr": 0.01, **options}
    )
    for step in range(steps):
        for k, param in enumerate(params):
            gradient = gaussian(
                *param.shape, seed=100 * step + k, scale=2.0 ** (k - 3), dtype=dtype
            )
            if step in (2, 4) and k == 0:
                gradient[0, 3] = torch.inf if step == 2 else torch.nan
            param.grad = (
                None
                if step == 1 and k in (0, 3)
                else unaligned(param.shape, gradient)
                if k == 1
                else gradient
            )
        optimizer.step()
    return optimizer


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("rule", "storage"), FEW)
def test_steps_of_an_optimizer_are_the_same(rule: str, storage: str) -> None:
    ours, theirs = (
        train(rule, storage, compiled=compiled, max_grad_norm=1.0) for compiled in (True, False)
    )
    assert all(ours.ran_compiled().values()) and not any(theirs.ran_compiled().values())
    assert ours.num_skipped == theirs.num_skipped == 2
    assert_same_bits(everything(ours), everything(theirs))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("rule", "storage"), [("adamw", "word"), ("adamw", "states8"), ("muon", "word")]
)
def test_an_audit_reads_the_same_and_changes_no_bit(rule: str, storage: str) -> None:
    """NaNs and infinities are left alone, since sums of them say nothing."""
    ours, theirs = (
        train(rule, storage, compiled=compiled, steps=2, audit_every=1)
        for compiled in (True, False)
    )
    assert_same_bits(everything(ours), everything(theirs))
    for name, reading in ng.audit(theirs).items():
        assert ng.audit(ours)[name].edq == pytest.approx(reading.edq, abs=1e-4, nan_ok=True), name
        assert ng.audit(ours)[name].lost_fraction == pytest.approx(
            reading.lost_fraction, abs=1e-6, nan_ok=True
        ), name


@pytest.mark.usefixtures("interpreted")
def test_an_audit_of_a_large_tensor_reads_each_program_once_in_turn() -> None:
    params = parameters("word", [(100, 64)])
    optimizer = ng.AdamW(params, storage="word", compile=True, audit_every=1)
    state = optimizer.make_states(optimizer.param_groups[0], params)[params[0]]
    audits = [multi_tensor.audit_of(state, turn) for turn in range(40)]
    period = state.layout.audit(params[0].shape, multi_tensor.BLOCK)[0]
    assert len(set(audits)) == period > 1
    assert sum(elements for *_, elements in set(audits)) == 6400
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert ng.audit(optimizer)["param 0"].edq == pytest.approx(1.0, abs=0.1)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_norm_has_the_bits_of_the_definition(dtype: torch.dtype) -> None:
    tensors = [
        gaussian(5, 7),
        gaussian(0, 3, dtype=dtype),
        gaussian(40, 64, scale=1e3, dtype=dtype).t(),
    ]
    assert multi_tensor_squares.sums_on(tensors)
    table = multi_tensor_squares.SquaresTable()
    for value in (1.0, -torch.inf, torch.nan):
        tensors[0][2, 2] = value
        assert_same_bits({"": exact_squares(tensors, table=table)}, {"": exact_squares(tensors)})
        assert table.finite(tensors[::-1])() == [True, True, value == 1.0]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("count", [2, 9])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_is_one_launch(
    monkeypatch: pytest.MonkeyPatch, count: int, max_grad_norm: float | None
) -> None:
    """A second launch adds the sums of an audit. Two more find the norm, of gradients whose addresses are known."""
    params = parameters("word", [(4, 8)] * count)
    groups = [{"params": [p], "lr": 0.1 * k} for k, p in enumerate(params)]
    optimizer = ng.AdamW(groups, storage="word", compile=True, max_grad_norm=max_grad_norm)
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*args, **options)

        return call

    class Launched:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return counted(f"{self.name} of {grid[0]}", lambda *args, **options: None)

    launched = {name: Launched(name) for name in ("step", "add_up", "largest", "squares")}
    monkeypatch.setattr(multi_tensor, "is_proven", lambda *args: True)
    monkeypatch.setattr(multi_tensor_squares, "_is_proven", lambda *args: True)
    monkeypatch.setattr(multi_tensor, "functions", lambda *args: launched)
    monkeypatch.setattr(multi_tensor_squares, "functions", lambda *args: launched)
    for module, name in (
        (multi_tensor, "send"),
        (multi_tensor, "to_device"),
        (multi_tensor_squares, "send"),
        (clip, "send"),
    ):
        monkeypatch.setattr(module, name, counted("copies", getattr(torch_names, name)))
    for step in range(10):
        for p in params:
            p.grad = torch.ones_like(p) if step == 0 else p.grad
        calls.clear()
        optimizer.step()
        # At first also the tiles, the limits, and two tables of the norm; in an audit also the numbers of elements.
        assert calls.pop("copies") == {0: 3 if max_grad_norm is None else 5, 9: 2}.get(step, 1)
        names = [
            "step",
            *(["add_up"] if step == 9 else []),
            *(["largest", "squares"] if max_grad_norm else []),
        ]
        assert calls == {f"{name} of {count}": 1 for name in names}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("is_tried", [True, False])
def test_equal_matrices_share_two_launches_and_each_product(
    monkeypatch: pytest.MonkeyPatch, is_tried: bool
) -> None:
    """The products are shared if a stack has the bits of its matrices. A stack of experts is one already."""
    if not is_tried:
        monkeypatch.setattr(matrix, "_multiplies_stacks", lambda *args: False)
    alike = {n: matrix._multiplies_stacks((n, 8, 16), torch.float32, CPU) for n in (5, 3)}
    launches: Counter[bool] = Counter()
    launch = multi_tensor.Table.launch

    def counted(*args: Any, averages: bool, **options: Any) -> Any:
        launches[averages] += 1
        return launch(*args, averages=averages, **options)

    products: Counter[str] = Counter()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            products[function.overloadpacket.__name__] += 1
            return function(*args, **(kwargs or {}))

    results = []
    for compiled in (True, False):
        triton_printer.INTERPRET = compiled
        params = parameters("word", [(8, 16)] * 5 + [(3, 8, 16)])
        optimizer = ng.Muon(
            params, storage="word", compile=compiled, ns_steps=3, ns_dtype="float32"
        )
        for step in range(2):
            for k, p in enumerate(params):
                p.grad = gaussian(*p.shape, seed=10 * step + k, dtype=p.dtype)
            launches.clear()
            products.clear()
            with monkeypatch.context() as patch, Products():
                if step == 1:
                    patch.setattr(multi_tensor.Table, "launch", counted)
                optimizer.step()
            if compiled and step == 1:
                assert launches == {True: 1, False: 1}
                assert products["bmm"] == 3 * sum(alike.values())
                assert products["mm"] == 3 * sum(n for n in alike if not alike[n])
        results.append(everything(optimizer))
    assert_same_bits(*results)


@pytest.mark.usefixtures("interpreted")
def test_replays_of_a_captured_step_are_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is here the list of launches: without a GPU none can be captured."""
    results = []
    for is_captured in (True, False):
        params = parameters("states8", [(4, 16), (3, 5), (7,)])
        optimizer = ng.AdamW(
            params, storage="states8", compile=True, lr=0.1, capturable=True, audit_every=2
        )
        graph: list[tuple[Any, ...]] = []
        for step in range(5):
            for k, p in enumerate(params):
                gradient = gaussian(*p.shape, seed=10 * step + k, dtype=p.dtype)
                p.grad = gradient if p.grad is None else p.grad.copy_(gradient)
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            if is_captured and step == 1:
                with monkeypatch.context() as patch:
                    patch.setattr(torch.cuda, "is_initialized", lambda: True)
                    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                    patch.setattr(multi_tensor.Table, "send", None)  # nothing is sent from a graph
                    patch.setattr(
                        multi_tensor.Table,
                        "launch",
                        lambda *args, audited, averages, graph=graph: graph.append(args),
                    )
                    optimizer.step()
                assert optimizer.num_steps(params[0]) == 1
            if graph:
                optimizer.advance()
                for table, control in graph:
                    table.launch(control, audited=False)
            else:
                optimizer.step()
        results.append(everything(optimizer))
    assert_same_bits(*results)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_keeps_no_gradient(max_grad_norm: float | None) -> None:
    """The next forward pass needs their memory. Without a norm, ``found_inf`` asks which were finite."""
    params = parameters("word", [(4, 8)])
    optimizer = ng.AdamW(params, storage="word", compile=True, max_grad_norm=max_grad_norm)
    optimizer.found_inf = torch.zeros(())
    params[0].grad = torch.ones_like(params[0])
    gradient = weakref.ref(params[0].grad.untyped_storage())
    optimizer.step()
    optimizer.zero_grad()
    assert gradient() is None


@pytest.mark.usefixtures("interpreted")
def test_loaded_states_replace_those_that_a_table_or_a_graph_holds() -> None:
    params = parameters("word", [(4, 8)])
    optimizer = ng.AdamW(params, storage="word", compile=True)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    before = weakref.ref(optimizer.state_of(params[0]))
    optimizer._captured = object()  # type: ignore[assignment]
    optimizer.load_state_dict(optimizer.state_dict())
    assert before() is None
    with pytest.raises(ng.errors.RecipeError, match="no CUDA graph"):
        optimizer.advance()


@pytest.mark.usefixtures("interpreted")
def test_an_audited_first_step_proves_what_a_graph_may_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = parameters("word", [(4, 8)])
    optimizer = ng.AdamW(params, storage="word", compile=True, audit_every=1)
    params[0].grad = torch.ones_like(params[0])
    proven: list[bool] = []
    monkeypatch.setattr(multi_tensor, "is_proven", lambda *args: not proven.append(args[-1]))
    optimizer.step()
    assert proven == [False, True]


def test_a_graph_reads_the_limits_of_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from the host's memory in a graph would be repeated from memory that was freed."""
    control = clip.StepControl(lambda count, device: True)
    with monkeypatch.context() as patch:
        patch.setattr(clip, "is_captured", lambda: True)
        patch.setattr(clip, "send", None)
        limits = control.send(CPU, 1.0, 9.0)
    control.send(CPU, 2.0, 3.0)
    assert limits.tolist() == [1.0, 0.0, 2.0, 3.0]


def test_a_replay_refuses_what_a_step_refuses_and_a_limit_without_a_norm() -> None:
    optimizer = ng.AdamW(parameters("word", [(4, 8)]), storage="word")
    decision = clip.Decision(torch.zeros(2), None, None)
    optimizer._captured = SimpleNamespace(decision=decision)  # type: ignore[assignment]
    optimizer.max_grad_norm = 1.0
    with pytest.raises(ng.errors.RecipeError, match="without a norm"):
        optimizer.advance()
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ng.errors.RecipeError, match="lr = nan"):
        optimizer.advance()


def test_a_graph_cannot_hold_a_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters("word", [(4, 8)])
    optimizer = ng.AdamW(params, storage="word")
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(ng.errors.RecipeError, match="no CUDA graph"):
        optimizer.advance()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ng.errors.RecipeError, match="first step"):
        optimizer.step()
    assert optimizer.state_of(params[0]) is None  # nothing has filled it


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("storage", ["word", "compact"])
def test_ranks_that_split_columns_bound_their_rows_together(
    monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """So no launch takes such a tensor, if its rows have scales."""
    params = parameters(storage, [(4, 6)])
    optimizer = ng.AdamW(params, storage=storage, compile=True)
    (state,) = optimizer.make_states(optimizer.param_groups[0], params).values()
    state.kernel.compile, state.gradient = True, torch.ones_like(params[0])
    monkeypatch.setattr(multi_tensor, "is_proven", lambda *args: True)
    monkeypatch.setattr(ParameterState, "column_groups", property(lambda state: [object()]))
    stepper = SimpleNamespace(group=optimizer.param_groups[0], audit_every=0)
    assert multi_tensor.Launches({}).take(stepper, [state]) == (
        [state] if storage == "compact" else []
    )


@pytest.mark.usefixtures("interpreted")
def test_a_rule_without_a_text_takes_the_other_route_and_says_so() -> None:
    rule = Rule(
        "odd",
        (),
        ("lr",),
        lambda group, step: (group["lr"],),
        lambda w, g, s: (s["lr"] * g.tanh(),),
    )
    results = []
    for compiled in (True, False):
        params = parameters("word", [(4, 6)])
        optimizer = ng.Optimizer(params, rule, {"lr": 0.1}, storage="word", compile=compiled)
        params[0].grad = torch.ones_like(params[0])
        if compiled:
            with pytest.warns(UserWarning, match="Cannot compile the step .*tanh"):
                optimizer.step()
        else:
            optimizer.step()
        results.append(everything(optimizer))
    assert_same_bits(*results)


@pytest.mark.usefixtures("interpreted")
def test_other_bits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    source = multi_tensor.source
    monkeypatch.setattr(
        multi_tensor,
        "source",
        lambda *a, **o: source(*a, **o).replace("tl.sqrt_rn", "2.0 * tl.sqrt_rn"),
    )
    with pytest.warns(UserWarning, match="other bits"):
        assert not multi_tensor.is_proven(*kernel_of("adamw", "word"), CPU, False)


@pytest.mark.parametrize(
    ("rule", "storage"), [("adamw", "word"), ("lion", "states8"), ("muon", "word")]
)
def test_a_gpu_rounds_every_operation_and_moves_16_bytes_at_a_time(rule: str, storage: str) -> None:
    """Compiled without a GPU. ``./dev gpu --compile`` compiles all pairs, for three architectures."""
    row = benchmark_module("gpu").compiled_row(*kernel_of(rule, storage), True, False, 90)
    assert row["passes"] == "yes", row
