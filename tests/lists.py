"""Lists of schemes in pages, written anew, and what a new scheme costs: `python -m tests.lists`, or `make lists`."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from rope_patch.cli import main
from tests import test_simulated_device
from tools import explorer

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "schemes.md"
TABLE = re.compile(r"(?<=<!-- schemes -->\n).*?(?=<!-- end -->)", re.DOTALL)


def with_lists(page: str) -> str:
    """The page with the table that `rope-patch list --markdown` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["list", "--markdown"])
    return TABLE.sub(lambda _: printed.getvalue(), page)


if __name__ == "__main__":
    PAGE.write_text(with_lists(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    explorer.main(explorer.Options())
    test_simulated_device.write_missing()
