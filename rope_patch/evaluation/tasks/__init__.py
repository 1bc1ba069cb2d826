"""The tasks that `rope_patch.evaluation.run` measures under every scheme at every length."""
