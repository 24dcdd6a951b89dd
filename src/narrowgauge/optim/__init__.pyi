from .audit.audit import Alarm as Alarm
from .audit.audit import AuditedUpdates as AuditedUpdates
from .audit.audit import UpdateLossWarning as UpdateLossWarning
from .optimizers import GaLore as GaLore
from .rules.elementwise import Rule as Rule
