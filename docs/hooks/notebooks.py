"""The notebooks as pages: text, code and the outputs that are stored with them."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
_EQUATION = re.compile(r"(?P<code>`[^`\n]+`)|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+)\$", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and a file for each of its pictures."""
    for path in NOTEBOOKS:
        page, pictures = as_markdown(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def as_markdown(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page, and its pictures by name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        text = cell["cell_type"] == "markdown"
        parts.append(_EQUATION.sub(_typeset, source) if text else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![Output of the cell above]({name})")
            elif "text/html" in data:
                parts.append(_text(data["text/html"]))
            elif shown := _text(output.get("text") or data.get("text/plain", "")):
                parts.append(f"```text\n{shown}\n```")
    return "\n\n".join(parts) + "\n", pictures


def _typeset(match: re.Match[str]) -> str:
    """An equation as MathML in the line, or as the block that `mathematics.py` typesets."""
    if match["code"]:
        return match["code"]
    if match["block"]:
        return f"```math\n{match['block'].strip()}\n```"
    return f"<span>{convert(match['inline'])}</span>"  # in a span, `math` does not begin a block


def _text(lines: Any) -> str:
    return "".join(lines).strip("\n")
