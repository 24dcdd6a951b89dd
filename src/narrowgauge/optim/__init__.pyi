from .accumulation import AccumulationWarning as AccumulationWarning
from .audit import Alarm as Alarm
from .audit import Reading as Reading
from .audit import UpdateLossWarning as UpdateLossWarning
from .gradient_release import release_gradients as release_gradients
from .optimizers import GaLore as GaLore
from .optimizers import GradNormLoRP as GradNormLoRP
from .rules.elementwise import Rule as Rule
