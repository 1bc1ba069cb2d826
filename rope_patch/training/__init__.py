"""Training small models from scratch, and comparing position encodings by it."""
