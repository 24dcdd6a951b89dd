"""What a run's record says about its cause: signs, causes, and the findings that follow from them."""
