"""All regions of a scheme in one GPU kernel, written in Triton, an optional dependency."""
