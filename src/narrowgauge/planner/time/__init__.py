"""How long a step takes, in seconds: from single kernels and collectives to the whole step."""
