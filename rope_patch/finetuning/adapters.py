"""Which parameters are trained: all, low-rank adapters, or adapters with norms and embeddings.

LongLoRA (Chen et al. 2023, arXiv 2309.12307, table 2): adapters alone do not learn longer context (perplexity 11.44 at
32k), adapters with trained norms and embeddings do (8.12), almost as full fine-tuning does (8.08). Its code trains
every parameter with `norm` or `embed` in its name beside rank 8 adapters on q, k, v and o.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from rope_patch.errors import EvaluationError, require
from rope_patch.models.head import find_language_model
from rope_patch.models.reading import read_stacks
from rope_patch.mounting.parameters import NAME, learned_parameters
from rope_patch.patching import find_handles

Method = Literal["full", "lora", "lora_norms_embeddings"]


def check(method: str) -> None:
    """Refuse a method before anything is computed.

    Raises:
        MissingPackage: it needs PEFT, which is not installed.
    """
    if method != "full":
        require("peft", f"method={method!r}", "finetune")


def prepare(model: nn.Module, method: str, rank: int, alpha: float, dropout: float) -> nn.Module:
    """The model with the parameters of a method alone to be trained.

    What a scheme learns is trained under every method. What is trained is held in float32.

    Args:
        model: patched.
        method: one of `Method`.
        rank, alpha, dropout: of the adapters.

    Returns:
        the same model, or the `PeftModel` around it.

    Raises:
        MissingPackage: PEFT is not installed.
        EvaluationError: attention has no linear layers.
    """
    check(method)
    if method == "full":
        return model.requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    saved = [NAME] if learned_parameters(model) else []
    shared: dict[str, Any] = {}
    if method == "lora_norms_embeddings":
        saved += [*_norms(model), *_embeddings(model)]
        shared = {"ensure_weight_tying": find_language_model(model).config.tie_word_embeddings}
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=_projections(model),
        modules_to_save=saved or None,
        **shared,
    )
    adapted = get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # beside weights in bfloat16: small steps would be rounded away
            parameter.data = parameter.data.float()
    return adapted


def _projections(model: nn.Module) -> list[str]:
    """Names of the linear layers of attention, such as q_proj."""
    stacks = [stack for handle in find_handles(model) for stack, _ in handle.mounted] or read_stacks(model)
    found = {
        name
        for stack in stacks
        for layer in stack.layers
        for name, child in layer.module.named_modules()
        if isinstance(child, nn.Linear) and not name.startswith(f"{NAME}.")
    }
    if not found:
        raise EvaluationError(f"{type(model).__name__}: its attention has no linear layers that adapters could join")
    return sorted(found)


def _norms(model: nn.Module) -> list[str]:
    """Last names of the norms: modules that hold a vector and nothing else."""
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if "norm" in type(module).__name__.lower() and list(module.parameters(recurse=False))
        }
    )


def _embeddings(model: nn.Module) -> list[str]:
    embeddings = find_language_model(model).get_input_embeddings()
    return [name.rpartition(".")[2] for name, module in model.named_modules() if module is embeddings]
