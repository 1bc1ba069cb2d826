"""A factor for each request in vLLM, chosen when the request is admitted and kept until its last token.

vLLM asks its platform about each engine's config and each request, and `watch` lets the platform ask this module, too.
The engine of a folder with factors gets a logits processor, which changes no logits: vLLM shows it each request's
parameters at admission, and again in the worker, where it tells the rotary modules which factor each place of the batch
has. The factor depends only on the request, so both places find the same factor. It is part of the request's
`cache_salt`: blocks of prefixes are shared only under equal factors.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from rope_patch.errors import UnsupportedModel
from rope_patch.models.record import RECORD, Record
from rope_patch.serving.factors import Reaches
from rope_patch.serving.vllm_served import hold, reaches_of, recorded_schemes, served_of

_SALT = "rope_factor="
_NAME = re.compile(r"Factors_([\d_]+)_of_([\d_]+)_within_(\d+)")
_seen = threading.local()
"""The parameters that vLLM validated last in this thread, with their engine; vLLM validates the request of these
parameters next.
"""


def watch(platform: Any) -> None:
    """Let a platform of vLLM ask this module about configs and requests after its own checks; once is enough."""
    if not isinstance(vars(platform).get("validate_request"), functools.partial):
        platform.check_and_update_config = functools.partial(_prepare, platform.check_and_update_config)
        platform.validate_request = functools.partial(_admit, platform.validate_request)


def _prepare(check: Callable[[VllmConfig], None], config: VllmConfig) -> None:
    """Set up the engine of a folder that records a scheme.

    Raises:
        UnsupportedModel: the folder has factors, and the engine has another model runner, drafts tokens, or passes keys
            to other engines; or the scheme has a bias, and heads are divided.
    """
    check(config)
    model = config.model_config
    record = None if model is None else Record.read(model.hf_config)
    if record is None:
        return
    processes = config.parallel_config.tensor_parallel_size
    for scheme in recorded_schemes(record).values():
        what = "a bias" if "bias" in scheme.slots else "factors by head" if scheme.by_head else ""
        if processes > 1 and what:  # a process does not know which heads it has
            raise UnsupportedModel(
                f"{scheme} in vLLM: {what} with --tensor-parallel-size {processes} is not supported; 1 is allowed"
            )
    hold(model)
    text, reaches = model.hf_text_config, reaches_of(model)
    for each in (model.hf_config, text):  # vLLM reads a text model inside a model of images from its own config
        record.write(each)
    if reaches is not None and "rope_parameters" in record.native:
        text.rope_parameters = record.native["rope_parameters"]  # tables replace what follows from them
    if getattr(text, "rope_parameters", None):
        # vLLM shares rotary modules of equal parameters, also between the engines of a process
        text.rope_parameters = {**text.rope_parameters, RECORD: model.model}
    if reaches is None:
        return
    refused = {
        "its model runner V2 is not supported; set VLLM_USE_V2_MODEL_RUNNER=0": config.use_v2_model_runner,
        "speculative decoding (MTP too) is not supported": config.speculative_config is not None,
        "KV connectors are not supported, which may not tell keys of factors apart": config.kv_transfer_config
        is not None,
    }
    for what, holds in refused.items():
        if holds:
            raise UnsupportedModel(f"a factor for each request in vLLM: {what}")
    factors, lengths = ("_".join(map(str, x)) for x in (reaches.by_factor, reaches.by_factor.values()))
    name = f"{__name__}:Factors_{factors}_of_{lengths}_within_{model.max_model_len}"
    others = [each for each in model.logits_processors or () if each != name]
    model.logits_processors = [*others, name]


def _admit(validate: Callable[..., None], request: Any, params: Any) -> None:
    """Choose the factor of a request, and separate its blocks from those of other factors.

    Raises:
        VLLMValidationError: the request names a factor that it cannot have, or is too long; a server answers 400.
    """
    validate(request, params)
    if getattr(_seen, "params", None) is not params:
        return  # a request of an engine without factors
    processor, _seen.params = _seen.processor, None
    prompt = request.get("prompt_token_ids")
    if prompt is None:
        raise VLLMValidationError("a factor for each request needs prompts of tokens")
    try:
        factor = processor.choose(len(prompt), params)
    except ValueError as wrong:
        raise VLLMValidationError(str(wrong)) from wrong
    own = (request.get("cache_salt") or "").split(_SALT)[0]
    request["cache_salt"] = f"{own}{_SALT}{factor}"


class Factors(LogitsProcessor):
    """A logits processor that knows the factor of each place in the batch. vLLM finds its subclasses by name in each of
    its processes; they know how far factors reach.

    Attributes:
        reaches: lengths that the factors cover.
        longest: the longest text of the engine, in tokens.
    """

    reaches: ClassVar[Reaches]
    longest: ClassVar[int]

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        served = served_of(vllm_config)
        self._rows = None if served is None else served.rows
        self._factors: dict[int, int] = {}

    @classmethod
    def choose(cls, prompt: int, params: SamplingParams) -> int:
        """Choose the factor of a request with `prompt` tokens in its prompt.

        Raises:
            ValueError: the request names a factor that it cannot have, or is too long.
        """
        new = cls.longest if params.max_tokens is None else params.max_tokens
        tokens = min(prompt + new, cls.longest)
        try:
            factor = cls.reaches.choose(tokens, (params.extra_args or {}).get("rope_factor"))
        except ValueError as wrong:
            raise ValueError(f"{prompt} tokens of prompt and max_tokens={tokens - prompt}: {wrong}") from wrong
        return int(factor or 1)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Remember the parameters and the engine of the request that is admitted next."""
        _seen.params, _seen.processor = sampling_params, cls

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests that join, leave or move in the batch."""
        if self._rows is None or batch_update is None:
            return

        def index(params: SamplingParams, prompt: list[int] | None, _: list[int]) -> int:
            return list(self.reaches.by_factor).index(self.choose(len(prompt or ()), params))

        process_dict_updates(self._factors, batch_update, index)
        places = torch.tensor(list(self._factors), dtype=torch.long)
        self._rows.by_request[places] = torch.tensor(list(self._factors.values()), dtype=torch.long)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits unchanged, `(requests, vocabulary)`."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """Return True, because the logits stay unchanged."""
        return True


@functools.cache
def _processor(name: str) -> type[Factors]:
    """Make the logits processor class with the factors that its name spells."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    factors, lengths = ([int(part) for part in group.split("_")] for group in match.groups()[:2])
    reaches = Reaches(max(lengths), dict(zip(factors, lengths, strict=True)))
    return type(name, (Factors,), {"reaches": reaches, "longest": int(match[3]), "__module__": __name__})


def __getattr__(name: str) -> Any:
    return _processor(name)
