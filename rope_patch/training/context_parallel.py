"""Context parallelism in training: several processes share each row, in a Trainer or in your own loop."""

from rope_patch.context_parallel.block import ContextParallel, context_parallel, mesh_of, shard
from rope_patch.context_parallel.trainer import ContextParallelTrainer

__all__ = ["ContextParallel", "ContextParallelTrainer", "context_parallel", "mesh_of", "shard"]
