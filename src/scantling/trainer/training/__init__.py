"""From a recipe to a trained model: the step, the loop, checkpoints, and the run that joins them."""
