"""Checkpoints of other libraries: the values that they themselves read in them, whatever the ranks that wrote them.

``golden/foreign`` holds files that torchao, optimi, FlashOptim (its kernels, in Triton's interpreter) and DeepSpeed (two ranks)
wrote, with fingerprints of the values that each reads back (``make.py`` there). Megatron-Core, nanotron and TransformerEngine
need a GPU: their files are laid out here after their sources, which the modules of ``narrowgauge.checkpoints.conversion`` name.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import narrowgauge as ng
from checkpoints.conversion.unpickling import Trap
from narrowgauge.checkpoints.conversion.encodings import ENCODINGS
from narrowgauge.checkpoints.conversion.files import load_pickle
from narrowgauge.checkpoints.conversion.foreign import SHARDED, read_foreign
from narrowgauge.checkpoints.conversion.sharded import Fragment, gather, safetensors
from narrowgauge.checkpoints.conversion.source import Source
from narrowgauge.checkpoints.conversion.states import Checkpoint
from narrowgauge.cli.main import main
from narrowgauge.errors import DataError, RecipeError
from narrowgauge.spec.frameworks import FRAMEWORKS

GOLDEN = Path(__file__).parents[2] / "golden" / "foreign"
EXPECTED: dict[str, dict[str, str]] = json.loads((GOLDEN / "expected.json").read_text())
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weight", *MOMENTS)


def fingerprint(values: Tensor) -> str:
    return hashlib.sha256(values.detach().float().contiguous().numpy().tobytes()).hexdigest()[:16]


def values_of(source: Source) -> dict[str, dict[str, Tensor]]:
    return {name: {"weight": source.weights[name].float(), **source.states[name]} for name in source.weights}


def test_the_table_of_frameworks_is_the_one_of_the_readers() -> None:
    assert set(FRAMEWORKS) == {row.origin for row in ENCODINGS} | set(SHARDED)
    assert {name for name, row in FRAMEWORKS.items() if row.writes} == set(SHARDED)


# ── files that the packages wrote ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [name for name in EXPECTED if not name.startswith("deepspeed")])
def test_values_are_those_that_the_package_reads(name: str, tmp_path: Path) -> None:
    found = values_of(read_foreign(GOLDEN / f"{name}.pt", None))["big.weight"]
    assert {kind: fingerprint(found[kind]) for kind in EXPECTED[name]} == EXPECTED[name]
    report = ng.convert(GOLDEN / f"{name}.pt", "bfloat16/exact", tmp_path / "out")
    assert report.origin.lower() == name.partition("-")[0] and report.step == 3
    assert [kept.exact_share for kept in report.kept] == [1.0, 1.0, 1.0]


def test_moments_of_optimi_lose_the_bias_correction_that_it_stores_in_them() -> None:
    saved = load_pickle(GOLDEN / "optimi.pt")["optimizer"]
    group, entry = saved["param_groups"][0], saved["state"][0]
    found = values_of(read_foreign(GOLDEN / "optimi.pt", None))["big.weight"]
    for kind, beta in zip(MOMENTS, ("beta1", "beta2"), strict=True):
        raw = entry[kind].double() * (1 - group[beta] ** 3)
        assert torch.equal(found[kind], raw.float())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_joins_to_what_deepspeed_joins(stage: int, tmp_path: Path) -> None:
    folder = GOLDEN / f"deepspeed-zero{stage}"
    source = read_foreign(folder, None)
    assert {name: fingerprint(value) for name, value in source.weights.items()} == EXPECTED[folder.name]
    assert (source.origin, source.step, source.others["model.count"].tolist()) == ("DeepSpeed ZeRO", 3, [0, 1, 2])
    # The stages differ in who holds what, and not in what they compute.
    for name, values in values_of(read_foreign(GOLDEN / "deepspeed-zero1" / "global_step3", None)).items():
        assert all(torch.equal(values[kind], values_of(source)[name][kind]) for kind in KINDS)
    report = ng.convert(folder, "bfloat16/exact", tmp_path / "out")
    assert [kept.exact_share for kept in report.kept] == [1.0, 1.0, 1.0]


def test_zero_of_a_missing_rank_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "deepspeed-zero2", tmp_path / "ds")
    (tmp_path / "ds/global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(DataError, match=r"contains 1 .*and 2 ranks wrote it"):
        ng.convert(tmp_path / "ds", "bfloat16/word", tmp_path / "out")
    with pytest.raises(DataError, match="was given too"):
        ng.convert(GOLDEN / "deepspeed-zero2", "bfloat16/word", tmp_path / "out", GOLDEN / "optimi.pt")


# ── TransformerEngine ───────────────────────────────────────────────────────────────────────────────────────────────────


def fused_adam(master: str) -> tuple[dict[str, Any], Tensor, dict[str, Tensor]]:
    """What ``FusedAdam.state_dict()`` of TransformerEngine returns, its master as it stores it, and the float32 weight."""
    torch.manual_seed(0)
    exact = torch.randn(40, 30) * torch.logspace(-30, 3, 40)[:, None]
    bits = exact.view(torch.int32)
    # multi_tensor/adam.cu: the lower 16 bits as int16; the weight is rounded up where they are negative.
    remainder = (bits & 0xFFFF).to(torch.int16)
    weight = ((bits >> 16) + (remainder < 0)).to(torch.int16).view(torch.bfloat16)
    moments = {"exp_avg": torch.randn(40, 30), "exp_avg_sq": torch.rand(40, 30)}
    kept = {"int16": {"master_param": remainder}, "float32": {"master_param": exact}, "none": {}}[master]
    group = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "step": 7}
    state = {"state": {0: {**moments, **kept}}, "param_groups": [{**group, "params": [0]}]}
    return {"model": {"w": weight}, "optimizer": state}, exact if kept else weight.float(), moments


@pytest.mark.parametrize("master", ["int16", "float32", "none"])
def test_fused_adam_keeps_its_masters_and_the_step_of_its_group(master: str, tmp_path: Path) -> None:
    content, exact, moments = fused_adam(master)
    torch.save(content, tmp_path / "te.pt")
    report = ng.convert(tmp_path / "te.pt", "bfloat16/exact", tmp_path / "out")
    assert (report.origin, report.step) == ("FusedAdam", 7)
    assert [kept.exact_share for kept in report.kept] == [1.0, 1.0, 1.0]
    found = values_of(read_foreign(tmp_path / "te.pt", None))["w"]
    assert torch.equal(found["weight"], exact) and all(torch.equal(found[kind], moments[kind]) for kind in MOMENTS)


# ── Megatron-Core and nanotron, laid out after their sources ────────────────────────────────────────────────────────────


def made(shapes: dict[str, tuple[int, ...]]) -> dict[str, dict[str, Tensor]]:
    """Float32 values of a model by kind, by name."""
    torch.manual_seed(0)
    return {kind: {name: torch.randn(shape).abs() for name, shape in shapes.items()} for kind in KINDS}


MEGATRON = {
    "embedding.word_embeddings.weight": (8, 6),
    **{f"decoder.layers.{n}.mlp.linear_fc1.weight": (10, 6) for n in range(3)},
    **{f"decoder.layers.{n}.mlp.linear_fc1.layer_norm_weight": (6,) for n in range(3)},
    "output_layer.weight": (8, 6),
}


def stacked(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Layers of one kind as one tensor."""
    joined: dict[str, list[Tensor]] = {}
    for name, value in values.items():
        head, _, rest = name.partition("layers.")
        joined.setdefault(f"{head}layers.{rest.split('.', 1)[1]}" if rest else name, []).append(value)
    return {name: torch.stack(parts) if "layers" in name else parts[0] for name, parts in joined.items()}


def megatron(place: Path, values: dict[str, dict[str, Tensor]], flavour: str, step: int = 5) -> Path:
    """A ``torch_dist`` checkpoint: torch's DCP of Megatron's keys, and its ``common.pt`` or, newer, ``common_state``."""
    weight = "param" if flavour == "fully_reshardable" else "fp32_param"
    content: dict[str, Any] = {name: value.bfloat16() for name, value in stacked(values["weight"]).items()}
    for kind in KINDS:
        for name, value in stacked(values[kind]).items():
            key = weight if kind == "weight" else kind
            if flavour == "flattened":  # before 0.14: fragments of each dimension, then the values of a fragment
                parts = [value.shape[0] if "layers" in name else 1, *[1] * (value.ndim - 1)]
                value = value.reshape(*parts, -1)
            content[f"optimizer.state.{key}.{name}"] = value
    if flavour == "dp_reshardable":
        content["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.param"] = torch.zeros(9)
    settings = {"optimizer": {"optimizer": {"param_groups": [{"lr": 1e-3, "step": step}]}}, "iteration": step}
    place.mkdir()
    save_dcp(content, storage_writer=FileSystemWriter(place), no_dist=True)
    torch.save(settings, place / "common.pt")
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return place


NANOTRON = {
    "model.embed.weight": (8, 6),
    "model.up.weight": (10, 6),
    "model.down.weight": (6, 10),
    "model.norm.weight": (6,),
}
# The dimension that tensor parallelism divides.
DIVIDED = {"model.embed.weight": 0, "model.up.weight": 0, "model.down.weight": 1}


def nanotron(place: Path, values: dict[str, dict[str, Tensor]], tensor: int, data: int, step: int = 5) -> Path:
    """A checkpoint of nanotron with ``tensor`` ranks that divide parameters and ``data`` ranks of ZeRO-1."""
    offsets: dict[str, dict[str, tuple[str, str]]] = {}
    states: dict[tuple[int, int], dict[str, Any]] = {}
    for name, shape in NANOTRON.items():
        split = DIVIDED.get(name)
        for rank in range(tensor):
            size = shape[split] // tensor if split is not None else 0
            block = tuple(
                slice(rank * size, (rank + 1) * size) if dim == split else slice(0, length)
                for dim, length in enumerate(shape)
            )
            own = {kind: values[kind][name][block].contiguous() for kind in KINDS}
            *path, last = name.split(".")
            (place / "model" / Path(*path)).mkdir(parents=True, exist_ok=True)
            metadata = None
            file = f"model_{last}.safetensors"
            if split is not None:
                text = ["|".join(f"{s.start},{s.stop},None" for s in side) for side in (
                    tuple(slice(0, n) for n in own["weight"].shape), block)]  # fmt: skip
                metadata = {
                    "version": "1.5",
                    "local_global_slices_pairs": "#".join(text),
                    "unsharded_shape": str(shape),
                }
                file = f"model_{last}_pp-rank-0-of-1_tp-rank-{rank}-of-{tensor}.safetensors"
            save_file({"data": own["weight"].bfloat16()}, place / "model" / Path(*path) / file, metadata)
            length = own["weight"].numel()
            bounds = [min(length, part * -(-length // data)) for part in range(data + 1)]
            offsets[name] = {str(part): (str(bounds[part]), str(bounds[part + 1])) for part in range(data)}
            for part in range(data):
                state = states.setdefault((rank, part), {"state": {}, "names": {}, "gradient_accumulator": {}})
                number = len(state["names"])
                flat = {kind: value.flatten()[bounds[part] : bounds[part + 1]] for kind, value in own.items()}
                flat = {kind: value.clone() if data > 1 else own[kind] for kind, value in flat.items()}
                state["names"][number] = name
                state["state"][number] = {"step": torch.tensor(float(step)), **{kind: flat[kind] for kind in MOMENTS}}
                state["gradient_accumulator"][name] = flat["weight"]
    (place / "optimizer").mkdir()
    for (rank, part), state in states.items():
        middle = f"_dp-{part}-of-{data}" if data > 1 else ""
        state["param_groups"] = [{"lr": 1e-3, "params": list(state["names"])}]
        torch.save(state, place / "optimizer" / f"optimizer_pp-0-of-1{middle}_tp-{rank}-of-{tensor}_exp-0-of-1.pt")
    config = {"type": "x", "configs": {"param_name_to_dp_rank_offsets": offsets} if data > 1 else {}}
    (place / "optimizer" / "optimizer_config.json").write_text(json.dumps(config))
    (place / "checkpoint_metadata.json").write_text("{}")
    return place


LAYOUTS: dict[str, tuple[dict[str, tuple[int, ...]], Callable[[Path, dict[str, dict[str, Tensor]]], Path]]] = {
    "Megatron-Core fully_reshardable": (MEGATRON, lambda place, values: megatron(place, values, "fully_reshardable")),
    "Megatron-Core model space": (MEGATRON, lambda place, values: megatron(place, values, "model_space")),
    "Megatron-Core before 0.14": (MEGATRON, lambda place, values: megatron(place, values, "flattened")),
    "nanotron alone": (NANOTRON, lambda place, values: nanotron(place, values, 1, 1)),
    "nanotron tensor-parallel": (NANOTRON, lambda place, values: nanotron(place, values, 2, 1)),
    "nanotron tensor-parallel ZeRO": (NANOTRON, lambda place, values: nanotron(place, values, 2, 3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sharded_checkpoint_is_read_whole_and_exactly(layout: str, tmp_path: Path) -> None:
    shapes, write = LAYOUTS[layout]
    values = made(shapes)
    source = read_foreign(write(tmp_path / "theirs", values), None)
    assert source.step == 5 and layout.startswith(source.origin)
    assert source.weights.keys() == source.states.keys() == shapes.keys()
    for name, found in values_of(source).items():
        assert all(torch.equal(found[kind], values[kind][name]) for kind in KINDS), name


def test_a_fragment_that_is_there_twice_does_not_stand_for_one_that_is_missing() -> None:
    first = Fragment("w", "weight", torch.ones(3), (2, 3))
    with pytest.raises(DataError, match=r"contains 3 of the 6 values of 'w' \(weight\)"):
        gather([first, first], "theirs")
    second = Fragment("w", "weight", torch.zeros(3), (2, 3), start=3)
    joined = gather([first, second, first], "theirs")["weight"]["w"]
    assert joined.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_a_safetensors_file_of_any_dtype_is_mapped(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 3).to(torch.float8_e4m3fn)}, tmp_path / "w.safetensors")
    found, _ = safetensors(tmp_path / "w.safetensors", writable=False)
    content, dtype, shape = found["w"]
    assert (content.numel(), dtype, shape) == (6, torch.float8_e4m3fn, (2, 3))


def trained_by_us(values: dict[str, Tensor], steps: int, place: Path) -> dict[str, dict[str, Tensor]]:
    """A checkpoint of our own optimizer, and the values that it stores."""
    given = Checkpoint({name: value.clone() for name, value in values.items()})
    model, optimizer = ng.prepare(given, "bfloat16/word", lr=1e-2, compile=False, audit_every=0)
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place)
    names = optimizer.parameter_names()
    return {kind: {name: optimizer.stored(p, kind) for p, name in names.items()} for kind in KINDS}


TEMPLATES = {name: row for name, row in LAYOUTS.items() if "ZeRO" in name or "Core" in name}


@pytest.mark.parametrize("layout", TEMPLATES)
def test_our_state_is_written_into_a_copy_of_theirs(layout: str, tmp_path: Path) -> None:
    shapes, write = LAYOUTS[layout]
    values = made(shapes)
    theirs = write(tmp_path / "theirs", values)
    before = {file: file.read_bytes() for file in theirs.rglob("*") if file.is_file()}
    ours = trained_by_us(values["weight"], 5, tmp_path / "ours.pt")
    report = ng.convert(tmp_path / "ours.pt", out=tmp_path / "new", like=theirs)
    assert (report.origin, report.step, [kept.exact_share for kept in report.kept]) == ("narrowgauge", 5, [1.0] * 3)
    assert layout.startswith(report.recipe)
    for name, found in values_of(read_foreign(tmp_path / "new", None)).items():
        assert all(torch.equal(found[kind], ours[kind][name]) for kind in KINDS), name
    assert {file: file.read_bytes() for file in theirs.rglob("*") if file.is_file()} == before


def test_torch_itself_reads_the_copy(tmp_path: Path) -> None:
    values = made(MEGATRON)
    theirs = megatron(tmp_path / "theirs", values, "fully_reshardable")
    ours = trained_by_us(values["weight"], 5, tmp_path / "ours.pt")
    ng.convert(tmp_path / "ours.pt", out=tmp_path / "new", like=theirs)
    keys = {f"optimizer.state.exp_avg.{name}": value for name, value in stacked(ours["exp_avg"]).items()}
    keys |= {name: value.bfloat16() for name, value in stacked(ours["weight"]).items()}
    read = {key: torch.zeros_like(value) for key, value in keys.items()}
    load_dcp(read, storage_reader=FileSystemReader(tmp_path / "new"), no_dist=True)
    assert all(torch.equal(read[key], value) for key, value in keys.items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_our_state_is_written_into_a_copy_of_deepspeeds(stage: int, tmp_path: Path) -> None:
    like = GOLDEN / f"deepspeed-zero{stage}"
    ours = trained_by_us(dict(read_foreign(like, None).weights), 7, tmp_path / "ours.pt")
    report = ng.convert(tmp_path / "ours.pt", out=tmp_path / "new", like=like)
    assert report.step == 7 and [kept.exact_share for kept in report.kept] == [1.0] * 3
    found = read_foreign(tmp_path / "new", None)
    assert found.step == 7 and (tmp_path / "new" / "latest").read_text() == "global_step3"
    for name, values in values_of(found).items():
        assert all(torch.equal(values[kind], ours[kind][name]) for kind in KINDS), name
    if stage < 3:
        module = load_pickle(tmp_path / "new/global_step3/mp_rank_00_model_states.pt")["module"]
        assert all(torch.equal(module[name], ours["weight"][name].bfloat16()) for name in ours["weight"])


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    values = made(MEGATRON)
    theirs = megatron(tmp_path / "theirs", values, "fully_reshardable")
    trained_by_us(values["weight"], 3, tmp_path / "other-step.pt")
    trained_by_us({**values["weight"], "extra.weight": torch.ones(2, 2)}, 5, tmp_path / "more.pt")
    trained_by_us({**values["weight"], "output_layer.weight": torch.ones(2, 2)}, 5, tmp_path / "shape.pt")
    before = sorted(tmp_path.iterdir())
    cases: list[tuple[str, Any, type[Exception], str]] = [
        ("other-step.pt", theirs, DataError, "counts 5 steps in a pickle"),
        ("more.pt", theirs, DataError, "'extra.weight' is not among the weights"),
        ("shape.pt", theirs, DataError, r"has shape \(8, 6\)"),
        ("more.pt", tmp_path, DataError, "is no checkpoint of a framework"),
        ("more.pt", tmp_path / "more.pt", DataError, "is not a folder"),
    ]
    for name, like, error, says in cases:
        with pytest.raises(error, match=says):
            ng.convert(tmp_path / name, out=tmp_path / "new", like=like)
    for recipe, template in ((None, None), ("bfloat16/word", theirs)):
        with pytest.raises(RecipeError, match=r"(both|neither) was given"):
            ng.convert(tmp_path / "more.pt", recipe, tmp_path / "new", like=template)
    assert sorted(tmp_path.iterdir()) == before


def test_buckets_of_megatron_are_refused_with_the_way_out(tmp_path: Path) -> None:
    theirs = megatron(tmp_path / "theirs", made(MEGATRON), "dp_reshardable")
    with pytest.raises(DataError, match=r"dp_reshardable.*--dist-ckpt-optim-fully-reshardable"):
        ng.convert(theirs, "bfloat16/word", tmp_path / "out")
    (flat := tmp_path / "old" / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("5")
    torch.save({"model": {}, "args": None}, flat / "model_optim_rng.pt")
    with pytest.raises(DataError, match=r"torch format.*--ckpt-convert-format torch_dist"):
        ng.convert(tmp_path / "old", "bfloat16/word", tmp_path / "out")


def test_another_layout_is_refused_in_one_line(tmp_path: Path) -> None:
    core = megatron(tmp_path / "core", made(MEGATRON), "fully_reshardable")
    (core / "metadata.json").write_text("[]")
    shutil.copytree(GOLDEN / "deepspeed-zero1", tmp_path / "zero")
    torch.save({"optimizer_state_dict": {}}, next((tmp_path / "zero").rglob("*rank_0*_optim_states.pt")))
    piped = nanotron(tmp_path / "piped", made(NANOTRON), 1, 1)
    (piped / "optimizer" / "optimizer_config.json").write_text("{}")
    for name in ("core", "zero", "piped"):
        refused = CliRunner().invoke(
            main, ["convert", str(tmp_path / name), "--recipe", "bfloat16/word"], prog_name="narrowgauge"
        )
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.output
        assert "is not laid out as" in refused.stderr


def test_nothing_in_a_sharded_checkpoint_is_run(tmp_path: Path) -> None:
    trap = Trap(tmp_path / "sprung")
    core = megatron(tmp_path / "core", made(MEGATRON), "fully_reshardable")
    shutil.copytree(core, tmp_path / "index")
    torch.save({"optimizer": trap}, core / "common.pt")
    (tmp_path / "index" / ".metadata").write_bytes(pickle.dumps(trap))
    shutil.copytree(GOLDEN / "deepspeed-zero1", tmp_path / "zero")
    torch.save({"optimizer_state_dict": trap}, next((tmp_path / "zero").rglob("*rank_1*_optim_states.pt")))
    piped = nanotron(tmp_path / "piped", made(NANOTRON), 1, 1)
    torch.save({"state": trap}, next((piped / "optimizer").glob("*.pt")))
    for name in ("core", "index", "zero", "piped"):
        with pytest.raises(DataError, match="whose code is not run"):
            ng.convert(tmp_path / name, "bfloat16/word", tmp_path / "out")
    assert not (tmp_path / "sprung").exists() and not (tmp_path / "out").exists()


def test_the_command_writes_a_checkpoint_of_theirs(tmp_path: Path) -> None:
    like = GOLDEN / "deepspeed-zero2"
    trained_by_us(dict(read_foreign(like, None).weights), 3, tmp_path / "ours.pt")
    done = CliRunner().invoke(
        main, ["convert", str(tmp_path / "ours.pt"), "--like", str(like)], prog_name="narrowgauge"
    )
    assert done.exit_code == 0, done.output
    assert "narrowgauge → DeepSpeed ZeRO, step 3" in done.output and (tmp_path / "ours-deepspeed" / "latest").is_file()
