"""Train models: loss, data, checkpoints and callbacks, shared by the recipes."""
