from .hashing import fingerprint as fingerprint
