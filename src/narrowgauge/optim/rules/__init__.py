"""Update rules: what step an optimizer takes, as pure functions of float32 values."""
