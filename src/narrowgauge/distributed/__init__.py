"""Many ranks: how parameters are shared out over them, and how their gradients are summed."""
