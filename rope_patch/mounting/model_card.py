"""The section of a saved model's card, `README.md`, that says how to load it under its scheme."""

from __future__ import annotations

import re
from pathlib import Path

from rope_patch.schemes.base import Scheme
from rope_patch.schemes.reach import spelled

CARD = "README.md"

_BEGIN, _END = "<!-- rope_patch -->", "<!-- /rope_patch -->"
_HEAD = "---\nlibrary_name: transformers\ntags:\n- rope_patch\n---\n"


def write_card(folder: Path, scheme: Scheme, is_stated: bool) -> None:
    """Put the section into the card of a folder, in place of an earlier section; write a card if there is none.

    Args:
        is_stated: whether plain Transformers reads the scheme from the config.
    """
    alone = " Plain Transformers reads it, too." if is_stated else " Plain Transformers loads it without the scheme."
    section = (
        f"{_BEGIN}\n## Positions\n\nThis model was saved under the position scheme `{spelled(scheme)}`.{alone} To load "
        "it under the scheme:\n\n```python\n# pip install rope_patch\nimport rope_patch\n\n"
        f'model = rope_patch.from_pretrained("PATH OR HUB ID")\n```\n{_END}\n'
    )
    file = folder / CARD
    try:
        card = _without_section(file.read_text(encoding="utf-8")).rstrip() if file.is_file() else _HEAD.rstrip()
    except UnicodeDecodeError:  # somebody's own file: it stays as it is
        return
    file.write_text(f"{card}\n\n{section}", encoding="utf-8")


def copy_without_section(card: Path, copied: Path) -> bool:
    """Copy a card without its section, because a copy of the model may no longer record the scheme.

    Returns:
        whether the card had the section; if not, the caller has to copy it.
    """
    content = card.read_bytes()
    if _BEGIN.encode() not in content:
        return False
    copied.write_text(_without_section(content.decode(errors="replace")), encoding="utf-8")
    return True


def _without_section(text: str) -> str:
    return re.sub(rf"\n*{_BEGIN}.*?{_END}\n?", "\n", text, flags=re.DOTALL)
