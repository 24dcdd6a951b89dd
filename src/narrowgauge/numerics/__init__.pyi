from narrowgauge.numerics.summation import fingerprint as fingerprint
