"""The recipes that come with the library: what each is for, the files that it needs, and copies of them.

A recipe is a script, or a description in YAML that one of the scripts carries out.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from rope_patch.errors import EvaluationError, did_you_mean
from rope_patch.shipped import recipes_folder

SCRIPTS = {
    "encodings": "compare_encodings",
    "target": "sweep",
    "task": "passkey",
    "vocab_size": "pretrain_tiny",
    "tokenizer": "pretrain_tiny_t5",
    "length": "finetune",
    "lengths": "perplexity",
}
"""Which script a description is for, by the first of these keys that it has."""

_MENTIONED = re.compile(r"recipes/[\w./-]*\w")
_COMMAND = re.compile(r"python recipes/\S+\.py[^#\n]*")


@dataclass(frozen=True)
class Recipe:
    """One recipe.

    Attributes:
        name: the stem of its file.
        about: what it does, in a sentence.
        commands: how it is run from the folder that holds `recipes`, in this order.
        files: that it needs, as paths below that folder; a checkpoint is a folder.
    """

    name: str
    about: str
    commands: tuple[str, ...]
    files: tuple[str, ...]


def names() -> list[str]:
    """All recipes, by the stems of descriptions and scripts."""
    folder = recipes_folder()
    return sorted({path.stem for path in (*folder.glob("*.py"), *folder.glob("configs/*.yaml"))})


def find(name: str) -> Recipe:
    """One recipe.

    Raises:
        EvaluationError: there is none of that name.
    """
    if name not in (known := names()):
        raise EvaluationError(f"there is no recipe {name!r}; {did_you_mean(name, known)}")
    config = f"recipes/configs/{name}.yaml"
    return _of_config(name, config) if _source(config).is_file() else _of_script(name)


def copy(recipe: Recipe, to: Path, *, force: bool = False) -> list[Path]:
    """Write the files of a recipe, so that its commands run from the folder `to`.

    Args:
        recipe: what to copy.
        to: gets a folder `recipes`, laid out as the library's own.
        force: replace files that differ from those of the library.

    Returns:
        what was written; a file that was there already, the same byte for byte, is left alone.

    Raises:
        EvaluationError: a file differs from the library's and `force` was not given; nothing was written then.
        OSError: a file cannot be read or written.
    """
    wanted = {to / name: _source(name) for place in recipe.files for name in _files_below(place)}
    missing = {path: source for path, source in wanted.items() if not _is_same(path, source)}
    if (taken := [str(path) for path in missing if path.exists()]) and not force:
        raise EvaluationError(f"{', '.join(taken)}: there already, and not as the library has it; --force overwrites")
    for path, source in missing.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
    return list(missing)


def _of_config(name: str, config: str) -> Recipe:
    text = _source(config).read_text(encoding="utf-8")
    keys = yaml.safe_load(text)
    script = f"recipes/{next(script for key, script in SCRIPTS.items() if key in keys)}.py"
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    before = tuple(shlex.join(shlex.split(command)) for command in _COMMAND.findall(text))
    files = _closure({config, script, *_mentioned(text)})
    return Recipe(name, comment or _about(_source(script)), (*before, f"python {script} {config}"), files)


def _of_script(name: str) -> Recipe:
    script = f"recipes/{name}.py"
    source = _source(script)
    documentation = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    command = next(iter(_COMMAND.findall(documentation)), f"python {script} --help")
    return Recipe(name, _about(source), (command.strip(),), _closure({script, *_mentioned(command)}))


def _about(script: Path) -> str:
    """The first sentence of a script's docstring, which may take two lines."""
    documentation = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return " ".join(documentation.split("\n\n")[0].split())


def _closure(files: set[str]) -> tuple[str, ...]:
    """These files and what they need in turn: the checkpoint of a description, what a script imports or reads."""
    found: set[str] = set()
    while files - found:
        place = min(files - found)
        found.add(place)
        if place.endswith(".yaml"):
            files |= _mentioned(_source(place).read_text(encoding="utf-8"))
        elif place.endswith(".py"):
            files |= _needed_by_code(_source(place))
    return tuple(sorted(found))


def _mentioned(text: str) -> set[str]:
    """The recipes, descriptions and checkpoints that a text names."""
    return {name for name in _MENTIONED.findall(text) if _source(name).exists()}


def _needed_by_code(script: Path) -> set[str]:
    """Neighbours that a script imports, and the checkpoints that it names."""
    found = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (script.parent / f"{node.module}.py").is_file():
            found.add(f"recipes/{node.module}.py")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isprintable():
            asset = f"recipes/assets/{node.value}"
            if re.fullmatch(r"[\w-]+", node.value) and _source(asset).is_dir():
                found.add(asset)
    return found


def _files_below(place: str) -> list[str]:
    source = _source(place)
    if source.is_file():
        return [place]
    return [f"{place}/{path.relative_to(source).as_posix()}" for path in sorted(source.rglob("*")) if path.is_file()]


def _source(name: str) -> Path:
    return recipes_folder().parent / name


def _is_same(path: Path, source: Path) -> bool:
    return path.is_file() and path.read_bytes() == source.read_bytes()
