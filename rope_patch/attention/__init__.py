"""Attention functions over regions: `oracle` is the meaning, the others are faster and equal it."""
