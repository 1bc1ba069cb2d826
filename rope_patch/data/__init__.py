"""Texts, windows of them for measurements, and rows of them for training."""
