"""The choice of a factor for each request: long requests run under a large factor, and short requests do not suffer
from it.

Under `yarn:target=auto` and a list of factors, a request runs under the smallest factor that covers its prompt and its
longest answer, from its first token to its last. Each factor has its own model, which shares the weights, and its own
batch, which keeps its own blocks of prefixes.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from rope_patch.errors import AlreadyPatched, InvalidField, RopePatchWarning
from rope_patch.evaluation.scheme_specs import scheme_at
from rope_patch.patching import find_handle, patch
from rope_patch.schemes import Scheme
from rope_patch.schemes.slots import Checkpoint

OPEN = "target=auto"
"""The field that a scheme must leave open, so that a request's factor fills it."""


@dataclass(frozen=True)
class Reaches:
    """The number of tokens of prompt and answer that each factor covers.

    Attributes:
        limit: the longest request in tokens.
        by_factor: the number of tokens by factor, in ascending order; empty if all requests run under one scheme.
    """

    limit: int
    by_factor: Mapping[int, int] = field(default_factory=dict)

    def of(self, factor: Any) -> int:
        """The longest request in tokens, or the longest under a factor if the request names one.

        Raises:
            ValueError: there is no such factor.
        """
        if factor is None:
            return self.limit
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise ValueError(f"rope_factor={factor!r:.40}: a number is allowed")
        if not self.by_factor:
            raise ValueError(f"rope_factor={factor:g} is not served: all requests run under one scheme here")
        if factor not in self.by_factor:
            raise ValueError(f"rope_factor={factor:g}: {', '.join(map(str, self.by_factor))} are allowed")
        return self.by_factor[int(factor)]

    def choose(self, tokens: int, factor: Any = None) -> int | None:
        """The factor of a request: the factor that it names, or the smallest that covers it; None without factors.

        Raises:
            ValueError: there is no such factor, or it does not cover the request.
        """
        if tokens > (reach := self.of(factor)):
            under = "" if factor is None else f" under rope_factor={factor:g}"
            raise ValueError(f"{reach} tokens of prompt and answer are allowed{under}")
        if factor is not None:
            return int(factor)
        return next((factor for factor, reach in self.by_factor.items() if reach >= tokens), None)


def schemes_by_factor(spec: str, factors: Sequence[int], checkpoints: Sequence[Checkpoint]) -> dict[int, Scheme]:
    """The scheme of each factor, in ascending order; each reaches the factor times L.

    Args:
        checkpoints: checkpoints of the parts of a model.

    Raises:
        InvalidField: the scheme leaves no target open, or is the same under two factors; or a factor is not a whole
            number of at least 1, or is listed twice.
        RopePatchError: the scheme does not reach one of the lengths, or is no scheme.
    """
    if spec.count(OPEN) != 1:
        raise InvalidField(f"{spec}: factors for requests need a scheme with {OPEN}, such as yarn:{OPEN}")
    if sorted({*factors}) != sorted(factors) or min(factors) < 1:
        raise InvalidField(f"factors {', '.join(map(str, factors))}: different whole numbers from 1 are allowed")
    trained = checkpoints[0].max_length
    schemes: dict[int, Scheme] = {}
    for factor in sorted(factors):
        scheme = scheme_at(spec, factor * trained, checkpoints)
        if scheme in schemes.values():
            raise InvalidField(f"{spec} is the same under every factor; leave the factors out")
        schemes[factor] = cast(Scheme, scheme)
    return schemes


def models_by_factor(schemes: Mapping[int, Scheme], model: Any) -> dict[int, Any]:
    """A model under the scheme of each factor. The models share the weights of `model`, which stays unchanged; each has
    its own buffers, and the additions of its patch.

    Raises:
        AlreadyPatched: the model has a scheme.
        RopePatchError: see `patch`.
    """
    if (handle := find_handle(model)) is not None:
        raise AlreadyPatched(f"{type(model).__name__} carries {handle.scheme}, so no factor can choose its scheme")
    models = {}
    for factor, scheme in schemes.items():
        models[factor] = sharing_weights(model)
        with ignoring_idle(factor):
            patch(models[factor], scheme)
    return models


def sharing_weights(model: Any) -> Any:
    """Copy a model so that the copy shares its weights, and has its own buffers and patches."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


@contextmanager
def ignoring_idle(factor: int) -> Iterator[None]:
    """Suppress warnings under a factor of 1, where most schemes rightly change nothing."""
    with warnings.catch_warnings():
        if factor == 1:
            warnings.simplefilter("ignore", RopePatchWarning)
        yield
