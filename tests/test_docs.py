"""The documentation without building it: pages, links, the reference, and the code in the pages."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import json
import re
import sys
import xml.etree.ElementTree
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

import rope_patch
from rope_patch import get_scheme, list_schemes
from rope_patch.evaluation.scheme_specs import scheme_at
from rope_patch.schemes import scheme_class

ROOT = Path(__file__).parents[1]
DOCS, RECIPES = ROOT / "docs", ROOT / "recipes"
SITE = yaml.compose((ROOT / "mkdocs.yml").read_text())
PAGES = sorted(path for path in DOCS.rglob("*.md") if "results" not in path.parts)
FILES = [*sorted(ROOT.glob("*.md")), *PAGES, *sorted((ROOT / "notebooks").glob("*.md"))]
GUIDES = [ROOT / "README.md", *sorted((DOCS / "how-to").glob("*.md"))]

SLOTS = sorted((DOCS / "reference" / "schemes").glob("*.md"))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^\]\\]|\\.)*\]\(([^)\s]+)\)")
DIRECTIVE = re.compile(r"^::: ([\w.]+)(?: \([\w, *]+\))?$", re.MULTILINE)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def prose(path: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", path.read_text()))


@cache
def anchors(path: Path) -> set[str]:
    """The names of its headings in links."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
    return slugs | ({hook_schemes()[one]["name"] for one in of_slot(path)} if path in SLOTS else set())


def python_blocks(path: Path) -> list[str]:
    return [code for language, code in FENCE.findall(path.read_text()) if language == "python"]


def in_navigation(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    inner = node.values() if isinstance(node, dict) else node
    return [page for part in inner for page in in_navigation(part)]


def hook(name: str) -> ModuleType:
    """A hook of the site, as MkDocs loads it."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location(name, DOCS / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def navigation() -> list[str]:
    # the rest of the file has tags of MkDocs, which the safe loader does not know
    nav = next(value for key, value in SITE.value if key.value == "nav")
    return in_navigation(yaml.safe_load(yaml.serialize(nav)))


def test_every_page_is_in_the_navigation_once():
    shown = hook("repository").SHOWN
    assert all((ROOT / name).is_file() for name in shown)
    pages = [path.relative_to(DOCS).as_posix() for path in PAGES]
    assert sorted(navigation()) == sorted([*pages, "explorer.html", *shown.values()])


def test_every_executor_is_on_both_pages_of_attention():
    names = {path.stem for path in (ROOT / "rope_patch/attention/executors").glob("[a-z]*.py")}
    table, modules = ((DOCS / name).read_text() for name in ("architecture/attention.md", "reference/attention.md"))
    assert sorted(names) == sorted(re.findall(r"^::: rope_patch\.attention\.executors\.(\w+)", modules, re.MULTILINE))
    assert not {name for name in names if f"`{name}`" not in table}


def test_nothing_is_installed_from_an_index_that_does_not_have_it():
    patterns = ("rope_patch/**/*.py", "recipes/*.py", "tools/*.py", "notebooks/*.ipynb")
    written = [*FILES, ROOT / "doctor" / "README.md", *(path for pattern in patterns for path in ROOT.glob(pattern))]
    assert not [
        path for path in written if re.search(r"pip install [\\'\"]*rope-(patch|doctor)(?! @ git)", path.read_text())
    ]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_link_leads_somewhere(path):
    shown = {page: name for name, page in hook("repository").SHOWN.items()}
    for link in LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        there = (path.parent / target).resolve() if target else path
        if not there.exists() and there.is_relative_to(DOCS):
            there = ROOT / shown.get(there.relative_to(DOCS).as_posix(), target)
        assert there.exists(), f"{relative(path)} links to {link}"
        assert not anchor or anchor in anchors(there), f"{relative(path)} links to {link}: no such heading"


def test_links_that_leave_the_site_become_names_of_files():
    repository = hook("repository")
    there = (
        "sweep.md",
        "index.md",
        "contributing.md",
        "notebooks/01_patch_in_one_line.md",
        "images/a.png",
        "notebooks/01_1.png",
    )
    files = SimpleNamespace(get_file_from_path=lambda path: path if path in there else None)

    def linked(text, uri="how-to/x.md"):
        return repository.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=uri)), None, files)

    assert linked("[a](../sweep.md#b)") == "[a](../sweep.md#b)"
    assert linked("[a](../../README.md#b)") == "[a](../index.md#b)"
    assert linked("[a](docs/sweep.md)", "index.md") == "[a](sweep.md)"
    assert linked('<img src="docs/images/a.png">', "index.md") == '<img src="images/a.png">'
    notebook = "notebooks/01_patch_in_one_line.ipynb"
    assert linked(f"[a]({notebook})", "index.md") == "[a](notebooks/01_patch_in_one_line.md)"
    assert (
        linked("[a](01_patch_in_one_line.ipynb)", "notebooks/02_perplexity_vs_length.md")
        == "[a](01_patch_in_one_line.md)"
    )
    assert linked("![a](01_1.png)", "notebooks/01_patch_in_one_line.md") == "![a](01_1.png)"
    assert linked("[a](https://b/c.md)") == "[a](https://b/c.md)"
    assert linked("[a](#b)") == "[a](#b)"
    assert linked("[a](../../CONTRIBUTING.md)") == "[a](../contributing.md)"
    assert linked("[recipes/a.py](../../recipes/a.py)") == "`recipes/a.py`"
    assert linked("[the recipe](../../recipes/a.py)") == "the recipe (`recipes/a.py`)"
    assert linked("![a](docs/images/a.png)", "contributing.md") == "![a](images/a.png)"
    code = "```\n[a](../../b.py)\n```\nand `[a](../../b.py)`"
    assert linked(code) == code


def test_pages_open_without_a_server(tmp_path):
    hook("repository").on_post_build(SimpleNamespace(site_dir=tmp_path))
    assert (tmp_path / "search" / "search_index.js").read_text().startswith("var __index = {")


@cache
def documented() -> list[str]:
    """What the reference is made of, by full name."""
    return [name for path in sorted((DOCS / "reference").rglob("*.md")) for name in DIRECTIVE.findall(path.read_text())]


@pytest.mark.parametrize("identifier", documented())
def test_the_reference_names_what_there_is(identifier):
    module, _, name = identifier.rpartition(".")
    found = importlib.util.find_spec(identifier) if module == "rope_patch" else None
    found = found or getattr(importlib.import_module(module), name, None) or importlib.util.find_spec(identifier)
    assert found is not None
    assert documented().count(identifier) == 1


def test_every_scheme_is_on_the_page_of_one_of_its_slots():
    found = {identifier: path.stem for path in SLOTS for identifier in of_slot(path)}
    assert found.keys() == {f"{scheme_class(name).__module__}.{scheme_class(name).__name__}" for name in list_schemes()}
    assert sum(len(of_slot(path)) for path in SLOTS) == len(found)
    assert all(slot in hook_schemes()[identifier]["slots"] for identifier, slot in found.items())


@cache
def scheme_hook() -> ModuleType:
    sys.path.insert(0, str(DOCS / "hooks"))
    try:
        return hook("schemes")
    finally:
        sys.path.remove(str(DOCS / "hooks"))


@cache
def hook_schemes() -> dict[str, Any]:
    return scheme_hook().schemes()


@cache
def of_slot(path: Path) -> list[str]:
    return scheme_hook().of_slot(path.stem)


def test_every_scheme_has_an_equation_an_example_and_a_use():
    schemes = scheme_hook()
    assert schemes.FACTS.keys() <= set(list_schemes())
    for name, facts in schemes.FACTS.items():
        assert facts["equation"]
        assert facts["when"].endswith(".")
        example = ast.parse(f"patch({schemes.example(name)})", mode="eval").body
        spec, fields = ast.literal_eval(example.args[0]), {each.arg: each.value for each in example.keywords}
        if name != "longrope":  # its two lists are the reader's
            scheme = get_scheme(spec, **{key: ast.literal_eval(value) for key, value in fields.items()})
            assert name in str(scheme)


def test_figures_of_a_scheme_come_from_the_rows():
    table = scheme_hook().table("rerope")
    row = next(line for line in table.splitlines() if "embedded checkpoint" in line)
    assert row.endswith("| `rerope:window=128` | 2.114 | 2.044 | 2.051 | 2.138 |")
    assert "sliding window" in table
    assert "in nats" not in scheme_hook().table("longrope")


@pytest.mark.parametrize("name", ["rerope", "yarn", "alibi", "logn", "cope"])
def test_every_kind_of_picture_is_drawn(name):
    caption, drawn = scheme_hook().draw(name)
    assert name in caption
    assert "<svg" in drawn
    assert "http" not in re.sub(
        r"xmlns(:\w+)?=\"[^\"]*\"|<!DOCTYPE[^>]*>|<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL
    )


EQUATIONS = [(path, code) for path in PAGES for language, code in FENCE.findall(path.read_text()) if language == "math"]


def test_equations_are_typeset_when_the_site_is_built():
    mathematics = hook("mathematics")
    facts = scheme_hook().FACTS
    equations = [code for _, code in EQUATIONS] + [fact["equation"] for fact in facts.values()]
    assert len(equations) > len(facts)
    for equation in equations:
        drawn = xml.etree.ElementTree.fromstring(mathematics.typeset(equation))
        assert not any("\\" in (part.text or "") or "&" in (part.text or "") for part in drawn.iter()), equation


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=relative)
def test_a_notebook_is_a_page_with_its_pictures_and_equations(path):
    page, pictures = hook("notebooks").as_markdown(path)
    assert all(f"]({name})" in page for name in pictures)
    source = "".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    assert page.count("```math\n") == source.count("$$") // 2
    assert "$" not in re.sub(r"`[^`\n]+`", "", FENCE.sub("", page))
    for equation in [code for language, code in FENCE.findall(page) if language == "math"]:
        xml.etree.ElementTree.fromstring(hook("mathematics").typeset(equation))


def test_the_help_of_a_command_is_a_table():
    options = "╭─ options ─╮\n│ --a INT  one of a|b │\n│ --long  │\n│     two  │\n╰───╯\n"
    page = hook("commands").as_markdown(f"usage: x [-h]\n\nWhat it does.\n\n    x --a 1\n\n{options}")
    assert "| `--a INT` | one of a&#124;b |\n| `--long` | two |" in page
    assert "What it does." in page.splitlines()
    assert "x --a 1" in page.splitlines()


def test_the_site_fetches_nothing():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings
    assert "http" not in settings
    assert not any("mermaid" in path.read_text() for path in PAGES)


@pytest.mark.parametrize("name", rope_patch.__all__)
def test_every_public_name_is_in_the_reference(name):
    value = getattr(rope_patch, name)
    if isinstance(value, str):
        assert f"`rope_patch.{name}`" in (DOCS / "reference" / "patch.md").read_text()
    else:
        assert {f"{value.__module__}.{name}", value.__module__} & {*documented(), *hook_schemes()}


def test_the_reference_has_the_help_of_every_command():
    helps = hook("commands").helps()
    assert {"rope-patch", "rope-patch perplexity", "rope-patch finetune"} <= helps.keys()
    assert all(said.lower().startswith(f"usage: {name}") and "\x1b" not in said for name, said in helps.items())


def test_the_help_explains_every_option_in_words():
    commands = hook("commands")
    found = {
        (name, option): said
        for name, text in commands.helps().items()
        for option, said in re.findall(r"^\| `(-.*?)` \| (.*) \|$", commands.as_markdown(text), re.MULTILINE)
    }
    assert len(found) > 150
    assert not [row for row, said in found.items() if not re.match(r"\w{2,}", said)]
    assert found["rope-patch sweep", "--seed INT"].startswith("random seed")


@pytest.mark.parametrize("path", GUIDES, ids=relative)
def test_python_in_the_guides_compiles(path):
    for code in python_blocks(path):
        ast.parse(code)


SHOWN = re.compile(r"^```python\n(.*?)^```\n(?:\n```(?:text)?\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
"""A Python block, and the block of output that follows it, if any."""

WITH_OUTPUT = [path for path in FILES if any(output for _, output in SHOWN.findall(path.read_text()))]
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


def pieces(text: str) -> list[str]:
    """The lines of an output without their margins, and without empty ones."""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def is_as_shown(shown: str, printed: str) -> bool:
    """Whether a page shows a line that was printed: "..." stands for the rest, and the last digit may differ."""
    if shown.endswith("..."):
        shown, printed = shown[:-3], printed[: len(shown) - 3]
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(one == other or abs(float(one) - float(other)) <= 2.5e-3 for one, other in pairs)


FROM_THE_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"  # which the README loads first; tests have no network

BY_COMMANDS = {DOCS / "how-to" / "end-to-end.md", DOCS / "how-to" / "positions-in-ci.md"}
"""Pages with the output of commands, which `test_end_to_end.py` and `doctor/test_page.py` compare."""


@pytest.mark.parametrize("path", [path for path in FILES if path not in BY_COMMANDS], ids=relative)
def test_every_block_of_output_follows_the_code_that_prints_it(path):
    text = path.read_text()
    assert text.count("```text") == sum(bool(output) for _, output in SHOWN.findall(text))


def test_the_pages_with_output_are_found():
    assert {relative(path) for path in WITH_OUTPUT} >= {"README.md", "docs/comparison.md"}


@pytest.mark.parametrize("path", WITH_OUTPUT, ids=relative)
def test_a_page_shows_what_its_code_prints(path, tmp_path, monkeypatch, capsys):
    for name in ("LICENSE", "recipes"):  # pages write to `runs`, which the repository may have filled
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code, output in SHOWN.findall(path.read_text()):
        exec(compile(code.replace(FROM_THE_HUB, "recipes/assets/tiny-llama"), relative(path), "exec"), names)
        printed, shown = pieces(capsys.readouterr().out), pieces(output)
        wrong = [pair for pair in itertools.zip_longest(shown, printed, fillvalue="") if not is_as_shown(*pair)]
        assert not (output and wrong), f"shown and printed: {wrong}"


def given_to_patch(code: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of schemes and their fields, from the calls of `patch` in a block that give literals."""
    for call in ast.walk(ast.parse(code)):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("patch", "rope_patch.patch"):
            fields = {each.arg: each.value for each in call.keywords if each.arg not in ("mount", "attention")}
            given = [*call.args[1:], *fields.values()]
            if call.args[1:] and all(isinstance(value, ast.Constant) for value in given) and None not in fields:
                yield call.args[1].value, {str(name): value.value for name, value in fields.items()}


NO_SCHEMES = {"WINNER", "yarm", "$(cat"}
"""A placeholder, a mistake that a page shows, and what a shell reads from a file."""


@pytest.mark.parametrize(
    "path", [*FILES, *sorted(RECIPES.rglob("*.py")), *sorted(RECIPES.rglob("*.yaml"))], ids=relative
)
def test_every_scheme_that_a_page_or_a_config_names_can_be_read(path):
    text = path.read_text()
    config = (yaml.safe_load(text) or {}) if path.suffix == ".yaml" else {}
    in_words = re.findall(r"--scheme[ =]+[\"']?([^\s\"'`]+)", text)
    for spec in {*in_words, *config.get("schemes", []), config.get("scheme", "plain")} - NO_SCHEMES:
        scheme_at(spec.rstrip(".,)"), 1)
    for code in python_blocks(path) if path.suffix == ".md" else ():
        for spec, fields in given_to_patch(code):
            assert spec in NO_SCHEMES or get_scheme(spec, **fields)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == rope_patch.__version__
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == "Apache-2.0"
