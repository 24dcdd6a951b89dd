from .exact_sums import ExactSums as ExactSums
from .hashing import fingerprint as fingerprint
