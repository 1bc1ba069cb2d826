"""The table of readers: one row for each program, with the computations in which it differs from the config.

A new row needs a source that anyone can open: a repository, a file and a version, or a thread. An inference without a
source is no deviation; write it into `Reader.unknown`.
"""

from __future__ import annotations

from ..reader import Reader
from .bugs import BUGS, Bug
from .deepspeed import DEEPSPEED, FASTGEN
from .exllama import EXLLAMA
from .llama_cpp import LLAMA_CPP
from .lmdeploy import LMDEPLOY_PYTORCH, TURBOMIND
from .megatron import MEGATRON
from .mlx import MLX, MLX_VLM
from .onnx import ONNX
from .sglang import SGLANG
from .tensorrt import TENSORRT
from .trainers import TRAINERS
from .transformers import TRANSFORMERS, TRANSFORMERS_4
from .vllm import VLLM

READERS: tuple[Reader, ...] = (
    *(TRANSFORMERS, TRANSFORMERS_4, VLLM, LLAMA_CPP, MLX, SGLANG, ONNX),
    *(MLX_VLM, EXLLAMA, TURBOMIND, LMDEPLOY_PYTORCH, TENSORRT, MEGATRON, DEEPSPEED, FASTGEN),
    *TRAINERS,
)
"""Every program in the table; the first is the reference."""

__all__ = ["BUGS", "READERS", "Bug", "Reader"]
