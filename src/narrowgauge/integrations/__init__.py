"""Recipes in other people's training loops: Lightning, Hugging Face, torchtitan, and loops of one's own.

Each module imports the package that it serves when it is imported itself, and nothing else in Narrowgauge imports these modules:
``import narrowgauge`` needs none of those packages.
"""
