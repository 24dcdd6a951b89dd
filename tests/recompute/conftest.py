"""The fixture that all tests of this folder use."""

from few_objects import few_objects as few_objects
