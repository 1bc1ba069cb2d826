"""How a scheme gets into a model, and out of it."""
