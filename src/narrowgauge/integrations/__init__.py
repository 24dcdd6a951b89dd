"""Recipes in other people's training loops: Lightning, Hugging Face, torchtitan, and loops of your
own.

Each module imports its framework when one of its names is used. Nothing else in Narrowgauge imports
it, so ``import narrowgauge`` needs none of the frameworks.
"""
