"""Teaching a patched checkpoint longer context: training rows, their positions, the run."""
