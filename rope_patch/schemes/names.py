"""What a typed name leads to: a registered scheme in any spelling, or advice where no scheme is meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from rope_patch.errors import UnknownScheme, nearest
from rope_patch.schemes.base import Scheme

_NOTHING = "for the model as it is, do not patch it, or call unpatch(model)"
_SINKS = (
    "lm_infinite comes nearest: a window and the first tokens, all far distances alike, such as "
    "lm_infinite:local_window=1024,n_global=4"
)
_ADVICE = {
    **dict.fromkeys(("none", "null", "plain", "off", "original", "native", "unpatched"), _NOTHING),
    **dict.fromkeys(("streamingllm", "attentionsink", "attentionsinks"), _SINKS),
}
"""What to write for names without a scheme here, or with other fields."""


WHERE = "`rope-patch list` shows all"


def folded(name: str) -> str:
    """A name without case, hyphens, underscores and spaces."""
    return re.sub(r"[-_\s]", "", name).lower()


def other_names(cls: type[Scheme]) -> list[str]:
    """What Transformers, vLLM and papers call a scheme."""
    return [name for name in (cls.rope_type, *vars(cls).get("aliases", ())) if name]


def find_name(typed: str, classes: Mapping[str, type[Scheme]], forms: Iterable[str] = ()) -> str:
    """The registered name that is meant.

    Args:
        typed: the name in any case, with or without hyphens and underscores; that of the class; or the name in
            Transformers (its `rope_type`), in vLLM or in a paper (its `aliases`).
        classes: the registered classes by name.
        forms: further registered names.

    Raises:
        UnknownScheme: with the five nearest names, or what to write instead.
    """
    names = [*classes, *forms]
    if typed in names:
        return typed
    spelled = {folded(name): name for name in names}
    for name, cls in classes.items():
        for other in (cls.__name__, *other_names(cls)):
            spelled.setdefault(folded(other), name)
    if (meant := spelled.get(folded(typed))) is not None:
        return meant
    if (advice := _ADVICE.get(folded(typed))) is not None:
        raise UnknownScheme(f"there is no scheme {typed!r}; {advice}")
    ranked = dict.fromkeys(spelled[other] for other in nearest(folded(typed), spelled, len(spelled), 0))
    *most, last = map(repr, list(ranked)[:5])
    raise UnknownScheme(f"there is no scheme {typed!r}; did you mean {', '.join(most)} or {last}? {WHERE}")
