"""The module for `evaluate.load`, which runs a copy of it, so all imports are absolute."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
from torch import nn

from rope_patch.evaluation.row import Rows
from rope_patch.evaluation.run import run
from rope_patch.evaluation.tasks.perplexity import Perplexity
from rope_patch.saving.loading import load_model, load_tokenizer
from rope_patch.schemes import Scheme

DESCRIPTION = """\
Perplexity against context length under several position schemes: does a model predict the same tokens better when it
sees more of the text before them? The model is patched with each scheme in turn, and restored.
"""

INPUTS = """
Args:
    predictions: the texts, one document each. Those too short for the longest length are skipped and counted.
    model: a loaded causal or T5-style language model of Transformers, or the folder of a checkpoint.
    tokenizer: its tokenizer; only needed for a loaded model.
    lengths: context lengths in tokens, ascending.
    schemes: such as "plain", "window" (attention cut at the training length) or "yarn:target=auto".
    name: of the model in the rows.
    results: `rope_patch.evaluation.row.Rows` on disk; rows of an earlier run in it are not measured again.
    **settings: others of `rope_patch.evaluation.tasks.perplexity.Perplexity`, such as protocol, targets and documents.
Returns:
    perplexities and nll: by scheme and length; rows: all data behind each figure.
Examples:
    >>> metric = evaluate.load(rope_patch.evaluation.perplexity_vs_length.PATH)
    >>> figures = metric.compute(predictions=[book], model="DIR", lengths=[256], schemes=["plain", "yarn:factor=4"])
    >>> figures["perplexities"]["yarn:factor=4"][256]
"""

CITATION = """\
Chen et al. 2023, Extending Context Window of Large Language Models via Positional Interpolation, arXiv 2306.15595;
Su 2023, ReRoPE, kexue.fm/archives/9708.
"""


class PerplexityVsLength(evaluate.Metric):
    """A metric of the `evaluate` library: perplexity against length."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("string")})
        return evaluate.MetricInfo(DESCRIPTION, CITATION, features, inputs_description=INPUTS)

    def _compute(
        self,
        predictions: Sequence[str],
        model: nn.Module | str,
        lengths: Sequence[int],
        tokenizer: Any = None,
        schemes: Sequence[str | Scheme] = ("plain", "window"),
        name: str | None = None,
        results: Rows | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        if isinstance(model, str):
            tokenizer = tokenizer or load_tokenizer(model)
            model = load_model(model, dtype="auto")
        elif tokenizer is None:
            raise ValueError("tokenizer=None: a loaded model needs its tokenizer")
        corpus = [{"name": f"predictions[{i}]", "text": text} for i, text in enumerate(predictions)]
        rows = run(model, Perplexity(tokenizer, corpus, **settings), schemes, lengths, results, name=name)
        figures: dict[str, Any] = {"perplexities": {}, "nll": {}, "rows": [json.loads(row.to_json()) for row in rows]}
        for row in rows:
            figures["perplexities"].setdefault(row.line, {})[row.length] = row.perplexity
            figures["nll"].setdefault(row.line, {})[row.length] = row.nll
        return figures
