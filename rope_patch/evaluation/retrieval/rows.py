"""Result rows of retrieval: one cell of one heat map each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_patch.evaluation.results import JsonLine


@dataclass(frozen=True)
class RetrievalRow(JsonLine):
    """One scheme at one length and depth, with everything that it depends on.

    Attributes:
        task: `passkey` or `spans`.
        model: name or folder of the checkpoint.
        weights: fingerprint of its parameters.
        line: the scheme as the report names it, such as `yarn:factor=auto`.
        scheme: the scheme that was measured, all fields filled in; `{"name": "plain"}` for none.
        regime: what the scheme says it needs before it makes sense.
        mount: where it was mounted; `none` for the plain checkpoint.
        length: context length in tokens; the model never reads more, answer included.
        depth: of what is hidden, as a share of the filler that stands before it.
        training_length: L in tokens.
        prompt_tokens: mean number of tokens that the model read.
        distance: the least number of tokens between the end of what is hidden and the end of the question; at L or
            more, attention cut at L sees nothing of it.
        span: tokens of a span; None for `passkey`.
        trials: number of prompts.
        seed: of the prompts.
        prompts: fingerprint of them, those of the control included.
        accuracy: share of the keys, or of the tokens of the spans, that are right.
        exact: share of the prompts with no fault.
        nll: of the right answer in nats per token; None for `passkey`.
        control_accuracy, control_exact, control_nll: of the same questions with nothing hidden; None for `passkey`.
        seconds: that the prompts took, without the control.
        dtype, attention, device: what it was computed with; `attention` is the implementation of Transformers.
        code, versions, commit: see `Row` of `rope_patch.evaluation.results`.
    """

    IDENTITY = (
        "task",
        "model",
        "weights",
        "scheme",
        "length",
        "depth",
        "trials",
        "prompts",
        "dtype",
        "attention",
        "code",
    )

    task: str
    model: str
    weights: str
    line: str
    scheme: dict[str, Any]
    regime: str
    mount: str
    length: int
    depth: float
    training_length: int
    prompt_tokens: float
    distance: int
    span: int | None
    trials: int
    seed: int
    prompts: str
    accuracy: float
    exact: float
    nll: float | None
    control_accuracy: float | None
    control_exact: float | None
    control_nll: float | None
    seconds: float
    dtype: str
    attention: str
    device: str
    code: str
    versions: dict[str, str]
    commit: str | None

    @property
    def far(self) -> bool:
        """Whether attention that is cut at L sees nothing of what is hidden."""
        return self.distance >= self.training_length
