"""Perplexity against length for the `evaluate` library: `evaluate.load(PATH)` needs no network."""

from pathlib import Path

PATH = str(Path(__file__).with_name("perplexity_vs_length.py"))
"""Path of the script that `evaluate.load` copies into its cache and runs there."""
