from narrowgauge.optim.accumulation import AccumulationWarning as AccumulationWarning
from narrowgauge.optim.audit import Alarm as Alarm
from narrowgauge.optim.audit import Reading as Reading
from narrowgauge.optim.audit import UpdateLossWarning as UpdateLossWarning
from narrowgauge.optim.gradient_release import release_gradients as release_gradients
from narrowgauge.optim.optimizers import GaLore as GaLore
from narrowgauge.optim.optimizers import GradNormLoRP as GradNormLoRP
from narrowgauge.optim.rules.elementwise import Rule as Rule
