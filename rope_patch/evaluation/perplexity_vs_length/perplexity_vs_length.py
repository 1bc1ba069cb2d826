"""The module that `evaluate.load` loads. It is run from a copy, so it imports rope_patch by its full name alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
from torch import nn

from rope_patch.evaluation.loading import load_model, load_tokenizer
from rope_patch.evaluation.perplexity import measure
from rope_patch.schemes import Scheme

DESCRIPTION = """\
Perplexity against context length under several position schemes: does a model predict the same tokens better when it
sees more of the text before them? The model is patched to each scheme in turn and left as it was.
"""

INPUTS = """
Args:
    predictions: the texts, one document each. Those too short for the longest length are left out and counted.
    model: a loaded causal or T5-style language model of Transformers, or the folder of a checkpoint.
    tokenizer: its tokenizer; only needed beside a loaded model.
    lengths: context lengths in tokens, ascending.
    schemes: such as "plain" (the checkpoint as it is), "window" (attention cut at the training length),
        "yarn:factor=auto" or "rerope:window=128+logn". Default: plain and window.
    protocol: "last" (the default for causal models), "by_position", "span_corruption", "sliding", "disjoint",
        "yarn_compat" or "yarn_truncate".
    **settings: others of `rope_patch.evaluation.perplexity.measure`: targets, stride, tokens_per_document, documents,
        windows_per_document, seed, name.
Returns:
    perplexities: by scheme and length.
    nll: the same in nats per token.
    rows: everything that each figure depends on, as dictionaries that JSON can hold.
Examples:
    >>> import evaluate
    >>> from rope_patch.evaluation.perplexity_vs_length import PATH
    >>> metric = evaluate.load(PATH)
    >>> found = metric.compute(predictions=[book], model="DIR", lengths=[256, 1024], schemes=["plain", "yarn:factor=4"])
    >>> found["perplexities"]["yarn:factor=4"][1024]
"""

CITATION = """\
@misc{su2023rerope,
  title = {Upgrading the Transformer's journey: the extrapolation of the length of RoPE (kexue.fm/archives/9708)},
  author = {Su, Jianlin},
  year = {2023}
}
@article{chen2023extending,
  title = {Extending Context Window of Large Language Models via Positional Interpolation},
  author = {Chen, Shouyuan and Wong, Sherman and Chen, Liangjian and Tian, Yuandong},
  journal = {arXiv preprint arXiv:2306.15595},
  year = {2023}
}
"""


class PerplexityVsLength(evaluate.Metric):
    """`measure` with the face of a metric."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string")}),
            reference_urls=["https://arxiv.org/abs/2306.15595", "https://kexue.fm/archives/9708"],
        )

    def _compute(
        self,
        predictions: Sequence[str],
        model: nn.Module | str,
        lengths: Sequence[int],
        tokenizer: Any = None,
        schemes: Sequence[str | Scheme] = ("plain", "window"),
        **settings: Any,
    ) -> dict[str, Any]:
        if isinstance(model, str):
            tokenizer = tokenizer or load_tokenizer(model)
            model = load_model(model)
        elif tokenizer is None:
            raise ValueError("tokenizer=None: a loaded model needs its tokenizer beside it")
        corpus = [{"name": f"predictions[{i}]", "text": text} for i, text in enumerate(predictions)]
        rows = measure(model, tokenizer, corpus, schemes, lengths, **settings)
        perplexities: dict[str, dict[int, float]] = {}
        nll: dict[str, dict[int, float]] = {}
        for row in rows:
            perplexities.setdefault(row.line, {})[row.length] = row.perplexity
            nll.setdefault(row.line, {})[row.length] = row.nll
        return {"perplexities": perplexities, "nll": nll, "rows": [json.loads(row.to_json()) for row in rows]}
