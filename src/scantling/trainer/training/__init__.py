"""Training: the step, the loop, checkpoints, and a whole run from its recipe."""
