"""Experiments: several runs that differ in their recipe, trained from the command line or in your own training loop."""
