from .alarms import Alarms as Alarms
from .reading import Readings as Readings
