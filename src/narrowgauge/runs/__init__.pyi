from narrowgauge.runs.finding import Finding as Finding
from narrowgauge.runs.writer import RunWriter as RunWriter
