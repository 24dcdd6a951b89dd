from .attach import GaugeNotice as GaugeNotice
from .nan_origin.bad_value import BadValue as BadValue
from .nan_origin.replay import first_bad_value as first_bad_value
from .recording.run_recorder import RunNotice as RunNotice
