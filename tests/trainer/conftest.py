"""The fixtures of tests that train."""

from trainer.fixtures import one_thread as one_thread
from trainer.fixtures import place as place
from trainer.fixtures import whole as whole
