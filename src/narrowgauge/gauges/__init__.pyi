from .attach import GaugeNotice as GaugeNotice
from .attach import Gauges as Gauges
from .hub import RunNotice as RunNotice
