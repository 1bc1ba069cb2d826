"""Choose the parameters to train: all, low-rank adapters, or adapters with norms and embeddings.

LongLoRA (Chen et al. 2023, arXiv 2309.12307, table 2): adapters alone do not learn longer context (perplexity 11.44 at
32k). Adapters with trained norms and embeddings do (8.12), almost like full fine-tuning (8.08). The authors' code
trains every parameter with `norm` or `embed` in its name, and rank 8 adapters on q, k, v and o.
"""

from __future__ import annotations

from torch import nn

from rope_patch.errors import EvaluationError, require
from rope_patch.models.find_stacks import read_stacks
from rope_patch.models.head import find_language_model
from rope_patch.mounting.parameters import NAME, learned_parameters
from rope_patch.patching import find_handles


def make_trainable(model: nn.Module, method: str, *, rank: int, alpha: float, dropout: float = 0.0) -> nn.Module:
    """Make only the parameters of a method trainable; returns the patched model, or a `PeftModel` around it.

    The methods are `full`, `lora`, `lora_norms`, `lora_embeddings` and `lora_norms_embeddings`; `rank`, `alpha` and
    `dropout` are settings of the adapters. All methods except `full` train in float32. Learned parameters of a scheme
    are trained with every method.

    Raises:
        MissingPackage: PEFT is not installed.
        EvaluationError: attention has no linear layers.
    """
    if method == "full":
        return model.requires_grad_(True)
    require("peft", f"method={method!r}", "finetune")
    from peft import LoraConfig, get_peft_model

    language_model = find_language_model(model)
    saved = [NAME] if learned_parameters(model) else []
    if "norms" in method:
        norms = [name for name, module in model.named_modules() if "norm" in type(module).__name__.lower()]
        weighted = (name for name in norms if list(model.get_submodule(name).parameters(recurse=False)))
        saved += sorted({name.rpartition(".")[2] for name in weighted})
    if "embeddings" in method:
        embeddings = language_model.get_input_embeddings()
        saved += [name.rpartition(".")[2] for name, module in model.named_modules() if module is embeddings]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=_projections(model),
        modules_to_save=saved or None,
        ensure_weight_tying="embeddings" in method and language_model.config.tie_word_embeddings,
    )
    adapted = get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # in bfloat16, small steps would be rounded away
            parameter.data = parameter.data.float()
    return adapted


def _projections(model: nn.Module) -> list[str]:
    """Names of the linear layers of attention, such as q_proj."""
    stacks = [stack for handle in find_handles(model) for stack, _ in handle.mounted] or read_stacks(model)
    modules = [named for stack in stacks for layer in stack.layers for named in layer.module.named_modules()]
    projections = {name for name, each in modules if isinstance(each, nn.Linear) and not name.startswith(f"{NAME}.")}
    if not projections:
        raise EvaluationError(f"{type(model).__name__}: its attention has no linear layers for adapters")
    return sorted(projections)
