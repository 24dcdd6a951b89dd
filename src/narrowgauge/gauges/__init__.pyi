from .attach import GaugeNotice as GaugeNotice
from .attach import Gauges as Gauges
from .recording.watch import RunNotice as RunNotice
