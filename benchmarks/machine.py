"""What the numbers depend on beside the code: processor, memory, threads, allocator, versions."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from rope_patch.evaluation.row import provenance

_ENVIRONMENT = (
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables that change times or memory."""


def facts(device: str) -> dict[str, Any]:
    """All of it, as plain JSON types; equal for two runs whose rows can be compared."""
    gpu = torch.cuda.get_device_properties(0) if device == "cuda" else None
    return {
        "machine": {
            "device": device,
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_gib": round(memory_bytes("cpu") / 2**30, 1),
            "gpu": gpu.name if gpu else None,
            "gpu_memory_gib": round(gpu.total_memory / 2**30, 1) if gpu else None,
        },
        "versions": provenance()["versions"],
        # unset variables are recorded: the default allocator is a setting too
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
    }


def memory_bytes(device: str) -> int:
    """Of the machine, or of its GPU."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def missing(device: str) -> str | None:
    """Why this device cannot be measured here, in one line; None where it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return f"no CUDA device: torch {torch.__version__} sees none on this machine"
    return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":  # `python -m benchmarks.machine cuda`, for the Makefile
    if reason := missing(sys.argv[1]):
        print(reason, file=sys.stderr)
        sys.exit(2)
