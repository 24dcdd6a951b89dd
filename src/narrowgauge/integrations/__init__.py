"""Recipes in other people's training loops: Lightning, Hugging Face, torchtitan, and loops of your own.

Each package imports the framework that it serves when one of its names is asked for, and nothing else in Narrowgauge imports it:
``import narrowgauge`` needs none of the frameworks.
"""
