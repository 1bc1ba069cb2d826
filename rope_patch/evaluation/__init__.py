"""Measuring: perplexity against length, corpora and reports."""
