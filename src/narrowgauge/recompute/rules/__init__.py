"""What an optimizer's rule makes of gradients and states and what its storage rounds: the right way, and those next to it."""
