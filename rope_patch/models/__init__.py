"""Interfaces of model families, measured on the model itself."""
