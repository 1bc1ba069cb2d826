"""What a checkout adds to the recipes: it fetches packages, draws pictures of the docs, makes committed checkpoints.

A tool is a script: `python -m tools.NAME`. `rope-patch plot` and `rope-patch checkpoint` are two of them.
"""
