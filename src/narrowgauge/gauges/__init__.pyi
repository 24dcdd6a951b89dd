from narrowgauge.gauges.attach import GaugeNotice as GaugeNotice
from narrowgauge.gauges.nan_origin.bad_value import BadValue as BadValue
from narrowgauge.gauges.nan_origin.replay import Replay as Replay
from narrowgauge.gauges.nan_origin.replay import first_bad_value as first_bad_value
from narrowgauge.gauges.nan_origin.replay import replay as replay
from narrowgauge.gauges.recording.run_recorder import RunNotice as RunNotice
