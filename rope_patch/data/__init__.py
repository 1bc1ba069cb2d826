"""Texts, and what measuring and training read of them."""
