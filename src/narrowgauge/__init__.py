"""Train language models in narrow number formats, know exactly what each format costs, and get the same bits again.

Every public name lives in one module and is loaded from there on first use, so that ``import narrowgauge`` costs
nothing and needs no PyTorch: the words (formats, chips, models, recipes) are plain values, and only the verbs that
touch tensors (``prepare``, ``AdamW``, ``round_to``, …) bring it in.

    >>> import narrowgauge as ng
    >>> ng.FORMATS["bfloat16"].bits
    16
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from narrowgauge.analysis.comparison.comparison import Comparison as Comparison
    from narrowgauge.analysis.comparison.comparison import compare_runs as compare_runs
    from narrowgauge.analysis.diagnosis.diagnosis import Diagnosis as Diagnosis
    from narrowgauge.analysis.diagnosis.diagnosis import diagnose as diagnose
    from narrowgauge.analysis.monitor.alarms import Alarms as Alarms
    from narrowgauge.assembly.preparation import prepare as prepare
    from narrowgauge.checkpoints.conversion.states import convert as convert
    from narrowgauge.checkpoints.conversion.states import restore as restore
    from narrowgauge.distributed.reduction import reduce_gradients_with as reduce_gradients_with
    from narrowgauge.errors import ChipError as ChipError
    from narrowgauge.errors import CorruptionError as CorruptionError
    from narrowgauge.errors import DataError as DataError
    from narrowgauge.errors import FormatError as FormatError
    from narrowgauge.errors import NarrowgaugeError as NarrowgaugeError
    from narrowgauge.errors import RankError as RankError
    from narrowgauge.errors import RecipeError as RecipeError
    from narrowgauge.errors import RecordError as RecordError
    from narrowgauge.gauges.attach import GaugeNotice as GaugeNotice
    from narrowgauge.gauges.attach import Gauges as Gauges
    from narrowgauge.gauges.attach import attach_gauges as attach_gauges
    from narrowgauge.gauges.nan_origin.bad_value import BadValue as BadValue
    from narrowgauge.gauges.nan_origin.replay import Replay as Replay
    from narrowgauge.gauges.nan_origin.replay import first_bad_value as first_bad_value
    from narrowgauge.gauges.nan_origin.replay import replay as replay
    from narrowgauge.gauges.recording.run_recorder import RunNotice as RunNotice
    from narrowgauge.gauges.recording.run_recorder import RunRecorder as RunRecorder
    from narrowgauge.integrations.check.findings import Findings as Findings
    from narrowgauge.integrations.check.findings import SetUpWarning as SetUpWarning
    from narrowgauge.integrations.check.findings import check as check
    from narrowgauge.matmul.cast_cache import cached_weights as cached_weights
    from narrowgauge.matmul.inference import inference_bytes as inference_bytes
    from narrowgauge.matmul.inference import quantize_for_inference as quantize_for_inference
    from narrowgauge.matmul.swapping import Linears as Linears
    from narrowgauge.matmul.swapping import linears_of as linears_of
    from narrowgauge.matmul.swapping import swap_experts as swap_experts
    from narrowgauge.matmul.swapping import swap_linears as swap_linears
    from narrowgauge.numerics.casting import round_to as round_to
    from narrowgauge.numerics.scaling import LossScaler as LossScaler
    from narrowgauge.numerics.summation import fingerprint as fingerprint
    from narrowgauge.optim.accumulation import AccumulationWarning as AccumulationWarning
    from narrowgauge.optim.accumulation import GradientAccumulator as GradientAccumulator
    from narrowgauge.optim.audit import Alarm as Alarm
    from narrowgauge.optim.audit import Reading as Reading
    from narrowgauge.optim.audit import UpdateLossWarning as UpdateLossWarning
    from narrowgauge.optim.audit import audit as audit
    from narrowgauge.optim.optimizer import Optimizer as Optimizer
    from narrowgauge.optim.optimizers import SGD as SGD
    from narrowgauge.optim.optimizers import Adafactor as Adafactor
    from narrowgauge.optim.optimizers import Adam as Adam
    from narrowgauge.optim.optimizers import AdamW as AdamW
    from narrowgauge.optim.optimizers import GaLore as GaLore
    from narrowgauge.optim.optimizers import GradNormLoRP as GradNormLoRP
    from narrowgauge.optim.optimizers import Lion as Lion
    from narrowgauge.optim.optimizers import Muon as Muon
    from narrowgauge.optim.release import release_gradients as release_gradients
    from narrowgauge.optim.rules.elementwise import Rule as Rule
    from narrowgauge.planner.plan import plan as plan
    from narrowgauge.planner.plan_report import Plan as Plan
    from narrowgauge.runs.events import Event as Event
    from narrowgauge.runs.events import on_event as on_event
    from narrowgauge.runs.finding import Finding as Finding
    from narrowgauge.runs.record import Run as Run
    from narrowgauge.runs.record import read_run as read_run
    from narrowgauge.runs.writer import RunWriter as RunWriter
    from narrowgauge.spec.chips import CHIPS as CHIPS
    from narrowgauge.spec.chips import Chip as Chip
    from narrowgauge.spec.computes import COMPUTES as COMPUTES
    from narrowgauge.spec.computes import Cast as Cast
    from narrowgauge.spec.computes import Compute as Compute
    from narrowgauge.spec.computes import Product as Product
    from narrowgauge.spec.formats import FORMATS as FORMATS
    from narrowgauge.spec.formats import Format as Format
    from narrowgauge.spec.notation import parse as parse
    from narrowgauge.spec.recipes import Recipe as Recipe
    from narrowgauge.spec.storages import STORAGES as STORAGES
    from narrowgauge.spec.storages import Storage as Storage
    from narrowgauge.spec.sums import ACCUMULATIONS as ACCUMULATIONS
    from narrowgauge.trainer.experiment.harness import compare as compare
    from narrowgauge.trainer.replays.step_replay import replay_step as replay_step

__version__ = "0.1.0"

# Where each public name lives: its one documented import path is ``narrowgauge.NAME``.
_HOMES = {
    "prepare": "assembly.preparation",
    "convert": "checkpoints.conversion.states",
    "restore": "checkpoints.conversion.states",
    "AdamW": "optim.optimizers",
    "Adam": "optim.optimizers",
    "SGD": "optim.optimizers",
    "Lion": "optim.optimizers",
    "Muon": "optim.optimizers",
    "Adafactor": "optim.optimizers",
    "GaLore": "optim.optimizers",
    "GradNormLoRP": "optim.optimizers",
    "Rule": "optim.rules.elementwise",
    "LossScaler": "numerics.scaling",
    "GradientAccumulator": "optim.accumulation",
    "AccumulationWarning": "optim.accumulation",
    "ACCUMULATIONS": "spec.sums",
    "release_gradients": "optim.release",
    "reduce_gradients_with": "distributed.reduction",
    "Optimizer": "optim.optimizer",
    "audit": "optim.audit",
    "attach_gauges": "gauges.attach",
    "Gauges": "gauges.attach",
    "GaugeNotice": "gauges.attach",
    "first_bad_value": "gauges.nan_origin.replay",
    "replay": "gauges.nan_origin.replay",
    "BadValue": "gauges.nan_origin.bad_value",
    "Replay": "gauges.nan_origin.replay",
    "on_event": "runs.events",
    "Event": "runs.events",
    "Alarms": "analysis.monitor.alarms",
    "check": "integrations.check.findings",
    "Finding": "runs.finding",
    "Findings": "integrations.check.findings",
    "SetUpWarning": "integrations.check.findings",
    "compare": "trainer.experiment.harness",
    "compare_runs": "analysis.comparison.comparison",
    "Comparison": "analysis.comparison.comparison",
    "diagnose": "analysis.diagnosis.diagnosis",
    "Diagnosis": "analysis.diagnosis.diagnosis",
    "replay_step": "trainer.replays.step_replay",
    "plan": "planner.plan",
    "Plan": "planner.plan_report",
    "read_run": "runs.record",
    "Run": "runs.record",
    "RunWriter": "runs.writer",
    "RunRecorder": "gauges.recording.run_recorder",
    "RunNotice": "gauges.recording.run_recorder",
    "Alarm": "optim.audit",
    "Reading": "optim.audit",
    "UpdateLossWarning": "optim.audit",
    "swap_experts": "matmul.swapping",
    "swap_linears": "matmul.swapping",
    "linears_of": "matmul.swapping",
    "Linears": "matmul.swapping",
    "cached_weights": "matmul.cast_cache",
    "quantize_for_inference": "matmul.inference",
    "inference_bytes": "matmul.inference",
    "round_to": "numerics.casting",
    "fingerprint": "numerics.summation",
    "parse": "spec.notation",
    "Recipe": "spec.recipes",
    "Compute": "spec.computes",
    "Product": "spec.computes",
    "Cast": "spec.computes",
    "COMPUTES": "spec.computes",
    "Storage": "spec.storages",
    "STORAGES": "spec.storages",
    "Format": "spec.formats",
    "FORMATS": "spec.formats",
    "Chip": "spec.chips",
    "CHIPS": "spec.chips",
    "NarrowgaugeError": "errors",
    "FormatError": "errors",
    "RecipeError": "errors",
    "ChipError": "errors",
    "CorruptionError": "errors",
    "DataError": "errors",
    "RankError": "errors",
    "RecordError": "errors",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'narrowgauge' has no attribute {name!r}")
    value = getattr(import_module(f"narrowgauge.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
