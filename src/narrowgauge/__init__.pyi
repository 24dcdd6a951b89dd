"""The public names. What is needed rarely is imported from its package."""

from . import errors as errors
from . import spec as spec
from .assembly.preparation import prepare as prepare
from .distributed.reduction import reduce_gradients_with as reduce_gradients_with
from .matmul.inference import quantize_for_inference as quantize_for_inference
from .matmul.swapping import swap_linears as swap_linears
from .measuring.check.check import check as check
from .measuring.diagnose.diagnose import diagnose as diagnose
from .measuring.reading import Reading as Reading
from .measuring.same.resume import check_resume as check_resume
from .measuring.same.same import same as same
from .measuring.watch.recorder import RunRecorder as RunRecorder
from .measuring.watch.recorder import watch as watch
from .numerics.rounding import round_to as round_to
from .optim.audit.audit import audit as audit
from .optim.averaging import AveragedModel as AveragedModel
from .optim.optimizer import Optimizer as Optimizer
from .optim.optimizers import SGD as SGD
from .optim.optimizers import Adam as Adam
from .optim.optimizers import AdamW as AdamW
from .optim.optimizers import Lion as Lion
from .optim.optimizers import Muon as Muon
from .optim.step.parameter_formats import cast_parameters as cast_parameters
from .optim.torch_state import full_weights as full_weights
from .optim.torch_state import to_torch_state as to_torch_state
from .planner.measured_run import MeasuredRun as MeasuredRun
from .planner.plan import plan as plan
from .runs.record import read_run as read_run
from .spec.parse import parse as parse
from .trainer.compare import compare as compare

__version__: str
