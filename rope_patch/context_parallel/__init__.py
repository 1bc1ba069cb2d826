"""Context parallelism: several processes share a row. `rope_patch.training.context_parallel` has the public names."""
