"""The public names; all others are under the packages that are imported first."""

from . import analysis as analysis
from . import errors as errors
from . import gauges as gauges
from . import matmul as matmul
from . import numerics as numerics
from . import optim as optim
from . import runs as runs
from . import spec as spec
from .analysis.comparison.comparison import Comparison as Comparison
from .analysis.comparison.comparison import compare_runs as compare_runs
from .analysis.diagnose import Diagnosis as Diagnosis
from .analysis.diagnose import diagnose as diagnose
from .assembly.preparation import prepare as prepare
from .checkpoints.adam_states import load_states as load_states
from .checks.checking import check as check
from .checks.resume import check_resume as check_resume
from .distributed.reduction import reduce_gradients_with as reduce_gradients_with
from .errors import NarrowgaugeError as NarrowgaugeError
from .gauges.attach import Gauges as Gauges
from .gauges.attach import attach_gauges as attach_gauges
from .gauges.recording.run_recorder import RunRecorder as RunRecorder
from .matmul.inference import quantize_for_inference as quantize_for_inference
from .matmul.swapping import swap_linears as swap_linears
from .numerics.rounding import round_to as round_to
from .numerics.scaling import LossScaler as LossScaler
from .optim.accumulation import GradientAccumulator as GradientAccumulator
from .optim.audit import audit as audit
from .optim.optimizer import Optimizer as Optimizer
from .optim.optimizers import SGD as SGD
from .optim.optimizers import Adafactor as Adafactor
from .optim.optimizers import Adam as Adam
from .optim.optimizers import AdamW as AdamW
from .optim.optimizers import Lion as Lion
from .optim.optimizers import Muon as Muon
from .planner.plan import plan as plan
from .planner.plan_tables import Plan as Plan
from .runs.events import Event as Event
from .runs.events import on_event as on_event
from .runs.record import Run as Run
from .runs.record import read_run as read_run
from .spec.notation import parse as parse
from .spec.recipes import Recipe as Recipe
from .trainer.compare import compare as compare
from .trainer.rounding_places import rounding_places as rounding_places

__version__: str
