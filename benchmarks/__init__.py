"""What patching costs, measured against plain attention on the same machine in the same process.

`python -m benchmarks.run` measures, `python -m benchmarks.report` shows what was measured.
"""
