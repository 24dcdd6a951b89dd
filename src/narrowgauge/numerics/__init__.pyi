from narrowgauge.numerics.checksums import fingerprint as fingerprint
