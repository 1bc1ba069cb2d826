"""The notes of a release: what CHANGELOG.md says of the version that the package has.

    python tools/release_notes.py [--tag v0.3.0] [--base https://HOST/OWNER/REPOSITORY/blob/v0.3.0]

The release workflow runs it before anything is built, so it needs the standard library alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## (.+)\n", re.MULTILINE)
RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)")


def version_of(package: str) -> str:
    """The version that the text of rope_patch/version.py gives."""
    return re.findall(r'^__version__ = "(.+)"$', package, re.MULTILINE)[0]


def release_notes(changes: str, version: str, base: str = "") -> str:
    """The section of a version in a change log, without its heading.

    Args:
        base: where relative links lead; a release page has no files beside it. Empty to leave them.

    Raises:
        ValueError: the newest section is of another version, or has no date.
    """
    _, heading, text, *_ = HEADING.split(changes)
    if not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", heading):
        raise ValueError(
            f"CHANGELOG.md begins with '## {heading}', and the version is {version}: write '## {version} - YYYY-MM-DD'"
        )
    return (RELATIVE_LINK.sub(f"]({base.rstrip('/')}/", text) if base else text).strip() + "\n"


def main(arguments: list[str] | None = None) -> int:
    """The command line; 2 where the tag, the version and the change log differ."""
    parser = argparse.ArgumentParser(prog="python tools/release_notes.py", description="Print the notes of a release.")
    parser.add_argument("--tag", default="", help="the tag of the release, which has to be v and the version")
    parser.add_argument("--base", default="", help="where relative links lead")
    options = parser.parse_args(arguments)
    version = version_of((ROOT / "rope_patch" / "version.py").read_text(encoding="utf-8"))
    try:
        if options.tag not in ("", f"v{version}"):
            raise ValueError(f"the tag is {options.tag}, and rope_patch/version.py has {version}: tag v{version}")
        print(release_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version, options.base), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
