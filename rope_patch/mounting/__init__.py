"""Mount a scheme on a model, and remove it."""
