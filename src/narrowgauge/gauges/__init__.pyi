from .attach import GaugeNotice as GaugeNotice
from .attach import Gauges as Gauges
from .nan_origin.bad_value import BadValue as BadValue
from .nan_origin.tracing import first_bad_value as first_bad_value
from .recording.watch import RunNotice as RunNotice
