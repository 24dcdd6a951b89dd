"""What a rank holds in a step, in bytes: states, activations, and the worst moment of the worst rank."""
