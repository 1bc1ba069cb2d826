"""Lists of schemes in pages, written anew, and what a new scheme costs: `python -m tests.lists`, or `make lists`."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from pathlib import Path

from rope_patch.cli import main
from rope_patch.schemes import list_schemes, scheme_class
from tests import test_simulated_device
from tools import explorer

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "schemes.md"
PUBLIC = PAGE.with_name("public.md")
CLASSES = re.compile(r"^Schemes, each with its fields: .*?\.$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"(?<=<!-- schemes -->\n).*?(?=<!-- end -->)", re.DOTALL)


def with_lists(page: str) -> str:
    """The page with the table that `rope-patch list --markdown` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["list", "--markdown"])
    return TABLE.sub(lambda _: printed.getvalue(), page)


def with_classes(page: str) -> str:
    """The page of what is public, with the class of every scheme."""
    names = sorted(scheme_class(name).__name__ for name in list_schemes())
    listed = ", ".join(f"`{name}`" for name in names)
    return CLASSES.sub(textwrap.fill(f"Schemes, each with its fields: {listed}.", 140), page)


if __name__ == "__main__":
    PUBLIC.write_text(with_classes(PUBLIC.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(with_lists(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    explorer.main(explorer.Options())
    test_simulated_device.write_missing()
