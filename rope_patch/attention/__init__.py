"""Attention functions over regions: `oracle` is the reference; the others are faster and must equal it."""
