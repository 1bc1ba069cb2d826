"""Tasks of EleutherAI's lm-evaluation-harness on a model under another position scheme.

    pip install lm-eval
    python recipes/lm_eval_patched.py --scheme yarn:factor=4 --max-length 1024 --text book.txt
    python recipes/lm_eval_patched.py --model DIR --scheme rerope:window=512+logn --tasks wikitext hellaswag

The harness takes a model that is loaded already, so a patched one needs nothing special. With `--text`, a local file is
the task, without a network: its perplexity over rolling windows of `--max-length` tokens.

How these windows differ from our protocol `disjoint`: the start-of-text (or else end-of-text) token stands in front of
the first window even where the tokenizer does not set it, so the first token of the text is scored too; each later
window begins with the last token of the one before, never with the start of text; and the last window is filled up
with earlier tokens, where ours is shorter. For a text that fills its windows exactly, with that token written in front
of it for `disjoint`, both give the same number.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.cli.options import Names, run


@dataclass(kw_only=True)
class Options:
    model: str | None = None  # checkpoint folder; default the small one that comes with the recipes
    scheme: str | None = None  # such as yarn:factor=4; default the checkpoint as it is
    tasks: Names = ()  # that the harness knows
    text: Path | None = None  # a text file as a task of its own
    max_length: int | None = None  # window in tokens; default the model's own
    limit: int | None = None  # examples per task; default all
    device: str = "auto"  # such as cpu or cuda:0; default an accelerator, else the CPU


def main(options: Options) -> None:
    """Let the harness evaluate the model under the scheme."""
    from rope_patch import patch
    from rope_patch.errors import EvaluationError, require
    from rope_patch.evaluation.checkpoints import default_checkpoint, load_model, load_tokenizer, quiet_transformers

    require("lm_eval", "this recipe")
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    if not options.tasks and options.text is None:
        raise EvaluationError("nothing to evaluate: give --tasks such as wikitext, or --text FILE")
    if options.text is not None and not options.text.is_file():
        raise EvaluationError(f"there is no text file {str(options.text)!r}")

    checkpoint = options.model or default_checkpoint()
    with quiet_transformers():
        model, tokenizer = load_model(checkpoint, device=options.device), load_tokenizer(checkpoint)
    tasks = [*options.tasks, *([rolling(options.text)] if options.text else [])]
    with patch(model, options.scheme) if options.scheme else nullcontext():
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, max_length=options.max_length, batch_size=1)
        found = lm_eval.simple_evaluate(model=wrapped, tasks=tasks, limit=options.limit, bootstrap_iters=0)

    print(f"{checkpoint} under {options.scheme or 'no scheme'}, windows of {wrapped.max_length} tokens")
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                print(f"{task:<16} {name.removesuffix(',none'):<18} {value:.4f}")
    if options.text is not None:
        show_nll(found["results"][options.text.stem], options.text, tokenizer)


def rolling(path: Path) -> dict[str, Any]:
    """A task of the harness, in the words of its YAML: the log-likelihood of one document."""
    return {
        "task": path.stem,
        "dataset_path": "text",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "sample_by": "document"},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    }


def show_nll(metrics: dict[str, Any], path: Path, tokenizer: Any) -> None:
    """In the unit of our own tables: the harness counts per byte or word, never per token."""
    text = path.read_text(encoding="utf-8")
    tokens = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    nll = math.log(metrics["byte_perplexity,none"]) * len(text.encode()) / tokens
    print(f"{path.stem:<16} {'nll per token':<18} {nll:.4f}   perplexity per token {math.exp(nll):.4f}")


if __name__ == "__main__":
    run(Options, main)
