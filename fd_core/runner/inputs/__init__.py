"""From a plan to the inputs of a model."""
