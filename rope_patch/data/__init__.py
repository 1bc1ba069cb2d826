"""Texts, and the windows and rows that measuring and training read of them."""
