"""All regions of a scheme in one kernel for GPUs, written in Triton, which is optional."""
