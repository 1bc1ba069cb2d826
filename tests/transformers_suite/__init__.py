"""Transformers' own tests, run on patched models: `make transformers-tests TRANSFORMERS=<checkout>`."""
