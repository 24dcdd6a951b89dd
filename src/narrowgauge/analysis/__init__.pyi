from narrowgauge.analysis.monitor.alarms import Alarms as Alarms
