"""The pieces of a step, each computed again by a module of its own: what departs, and under which alternative it agrees."""
