"""The model `rope_patch` of EleutherAI's lm-evaluation-harness: its `hf` with one more argument, `scheme=`.

    lm_eval --model rope_patch --model_args "pretrained=DIR,scheme=rerope:window=16384+logn" --tasks ruler
    python -m rope_patch.evaluation.lm_eval --model rope_patch ...

Releases after 0.4.13 find it by the entry point `lm_eval.models` (pull request 4013 of the harness). 0.4.13 finds no
models of other packages; with it, use the second line, which runs the harness's own command with this model registered.

The harness splits `--model_args` at commas. For a scheme with several fields write semicolons instead, put quotes
inside the quotes of the shell, or use JSON or the YAML file of `--config`.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lm_eval.models.huggingface import HFLM
from torch import nn

from rope_patch.errors import AlreadyPatched, EvaluationError, InvalidField, RopePatchError
from rope_patch.evaluation.measured_model import MeasuredModel
from rope_patch.evaluation.scheme_specs import PLAIN
from rope_patch.mounting.longest_text import longest_text
from rope_patch.patching import find_handle, patch, unpatch
from rope_patch.saving.checkpoint_kind import is_gguf, kind_of_checkpoint
from rope_patch.saving.loading import (
    base_of,
    follow_adapters,
    from_pretrained,
    load_config,
    load_tokenizer,
    quiet_adapters,
)
from rope_patch.schemes import scheme_class
from rope_patch.schemes.registry import scheme_from_dict, split_outside_brackets

NAME = "rope_patch"

ELSEWHERE = ("autogptq", "gptqmodel", "delta")
"""Arguments of `hf` that load weights without `from_pretrained`, so that no scheme would reach them."""

_say = logging.getLogger(f"lm_eval.{NAME}").info  # logged among the harness's own lines


class RopePatchLM(HFLM):
    """A checkpoint under a scheme, as a model of lm-eval. All other arguments are those of the harness's `hf`.

    Args:
        pretrained: a folder, a Hub ID, a GGUF file or a folder of PEFT adapters. Remote code is never run.
        scheme: a scheme such as `rerope:window=512+logn`, with `;` or `,` between fields; default the scheme that the
            checkpoint or the adapters record. `plain` is the checkpoint without a scheme. `target=auto` is
            `max_length`.
        max_length: longest prompt with its answer, in tokens; the harness cuts longer ones from the left. Default the
            length that the model reads under the scheme: its maximum, the length that the fields set, or 4 L if they
            set no limit.

    Raises:
        EvaluationError: an argument has no meaning for this model, or is a field of the scheme that a comma has cut
            off.
        RopePatchError: the checkpoint cannot be loaded, or the scheme does not fit it.
    """

    def __init__(
        self,
        pretrained: str,
        scheme: str | dict[str, Any] | None = None,
        max_length: int | None = None,
        tokenizer: Any = None,
        peft: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(pretrained, str):
            raise EvaluationError(
                f"pretrained={type(pretrained).__name__}: a path or a Hub ID is expected; a loaded model, patched or "
                "not, goes to lm_eval.models.huggingface.HFLM(pretrained=model, tokenizer=..., max_length=...)"
            )
        self._scheme = _read_scheme(scheme, kwargs)
        if isinstance(self._scheme, str) and max_length:
            self._scheme = self._scheme.replace("target=auto", f"target={max_length}")
        if used := [name for name in ELSEWHERE if kwargs.get(name)]:
            raise EvaluationError(f"{used[0]}={kwargs[used[0]]!r}: model {NAME} loads no such weights; use --model hf")
        if file := kwargs.get("gguf_file"):
            raise EvaluationError(f"gguf_file={file!r}: write pretrained={Path(pretrained, file)}")
        if is_gguf(pretrained):
            tokenizer = tokenizer or load_tokenizer(pretrained)
        elif kind_of_checkpoint(pretrained, subfolder=kwargs.get("subfolder")) == "adapters":
            peft, pretrained = pretrained, base_of(pretrained)
        if peft is not None:
            kind_of_checkpoint(peft)  # raises a clear error if it is no checkpoint
        super().__init__(pretrained, max_length=max_length, tokenizer=tokenizer, peft=peft, **kwargs)
        stack = MeasuredModel(self._model).stacks[0]
        handle = find_handle(self._model)
        self._max_length = max_length or longest_text(handle, stack.checkpoint)
        self._facts = {"scheme": str(handle.scheme) if handle else PLAIN, "training_length": stack.max_length}
        _say(
            "%s (L = %d) under %s, max_length=%d", pretrained, stack.max_length, self._facts["scheme"], self.max_length
        )

    def get_model_info(self) -> dict[str, Any]:
        """Add `scheme`, `training_length` and `max_length` to the facts that the harness writes into its results."""
        return {**super().get_model_info(), **self._facts, "max_length": self.max_length}

    def _get_config(self, pretrained: str, *, revision: str = "main", subfolder: str = "", **_: Any) -> None:
        location = {} if is_gguf(pretrained) else {"revision": revision, "subfolder": subfolder}
        self._config = load_config(pretrained, **location)

    def _create_model(self, pretrained: str, peft: str | None = None, revision: str = "main", **kwargs: Any) -> None:
        def load(path: str, **arguments: Any) -> nn.Module:
            for name in ("revision", "subfolder") if is_gguf(path) else ():
                arguments.pop(name)
            model = from_pretrained(path, **{name: value for name, value in arguments.items() if value is not None})
            if peft:
                follow_adapters(model, peft, revision=revision)
            _bring_under(model, self._scheme)
            return model

        auto_class: Any = self.AUTO_MODEL_CLASS
        self.AUTO_MODEL_CLASS: Any = SimpleNamespace(from_pretrained=load)
        try:
            with quiet_adapters():
                super()._create_model(pretrained, peft=peft, revision=revision, **kwargs)
        finally:
            self.AUTO_MODEL_CLASS = auto_class


def _read_scheme(scheme: Any, others: Mapping[str, Any]) -> Any:
    """Read the scheme in the form that `patch` takes; `others` are further arguments, none of which may be a field of
    the scheme.
    """
    if isinstance(scheme, dict) and "name" in scheme:
        return scheme_from_dict(scheme)
    if not isinstance(scheme, str):
        return scheme
    spec = ",".join(split_outside_brackets(scheme.strip("'\" "), ";"))
    fields = {"target"}
    for part in split_outside_brackets(spec, "+"):
        with suppress(RopePatchError):  # `patch` has the better error
            fields |= {field.name for field in dataclasses.fields(scheme_class(part.partition(":")[0]))}  # type: ignore[arg-type]
    if cut := {name: value for name, value in others.items() if name in fields}:
        parts = [spec, *(f"{name}={value}".rstrip("'\"") for name, value in cut.items())]
        apart = f"{next(iter(cut))}={cut[next(iter(cut))]!r}"
        raise EvaluationError(
            f"scheme={scheme!r} and {apart}: the harness splits --model_args at commas, also within a scheme. Write "
            f"scheme={';'.join(parts)} with semicolons, or quotes within those of the shell: "
            f"'scheme=\"{','.join(parts)}\"'"
        )
    return spec


def _bring_under(model: nn.Module, scheme: Any) -> None:
    """Patch a loaded model in place. The scheme replaces the one that the model was saved under; None keeps that
    scheme.
    """
    handle = find_handle(model)
    if scheme is None:
        return
    if scheme == PLAIN:
        if handle is not None:
            unpatch(model)
        return
    try:
        patch(model, scheme)
    except AlreadyPatched:
        if handle is None:
            raise
        _say("the checkpoint was saved under %s; it is measured under %s", handle.scheme, scheme)
        unpatch(model)
        patch(model, scheme)
    except InvalidField as error:
        if "target=auto" not in str(scheme):
            raise
        raise InvalidField(
            f"{error}. Or add max_length=N, the longest prompt with its answer: auto is that length"
        ) from error


def main() -> None:
    """Run the command of lm-eval with the model `rope_patch` registered."""
    import lm_eval.models  # registers the harness's own models  # noqa: F401
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=f"rope_patch.evaluation.lm_eval:{RopePatchLM.__name__}")
    try:
        cli_evaluate()
    except RopePatchError as error:
        print(f"rope-patch: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
