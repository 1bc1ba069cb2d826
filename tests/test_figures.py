"""The figures of the README and of some pages are those of the rows in docs/results."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest
import transformers

from benchmarks import ahead, report
from benchmarks.results import ResultFile, Row
from rope_patch.doctor.versions import older
from rope_patch.evaluation.row import Rows
from rope_patch.evaluation.scheme_specs import display_name
from rope_patch.evaluation.standard_errors import paired_difference
from tests.recipes import run_script
from tests.zoo import page as zoo
from tools import encodings_table
from tools.front import rounded

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"


def mean(name: str, line: str, length: int, model: str = "tinyllama-1.1b") -> float:
    """Mean NLL over the texts of a model's rows."""
    rows = Rows(RESULTS / "real" / model / f"{name}.jsonl").rows
    return statistics.fmean(row.loss for row in rows if (row.line, row.length) == (line, length))


NOVEL = [("plain", 16384), ("plain", 8192), ("rerope:window=4096", 16384)]  # beyond L, truncated, patched


def test_the_headline_of_the_readme() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    novel = [rounded(math.exp(mean("perplexity", *key, "smollm2-135m"))) for key in NOVEL]
    lines = ("plain", "cut", NOVEL[2][0], "near")
    far = [rounded(math.exp(mean("repeat", line, 16384, "smollm2-135m"))) for line in lines]
    told = (
        f"a perplexity of {novel[0]}, truncated text {novel[1]}, the patched model {novel[2]}.",
        f"The plain model has a perplexity of {far[0]}. Truncated text has lost the passage: {far[1]}.",
        f"The patched model still reads it: **{far[2]}**.",
        f"the plain model has {far[3]} on a passage that is inside its length",
        "a novel: plain model {}, truncated text {}, ReRoPE {}.".format(*novel),
        "repeated: plain model {}, truncated text {}, ReRoPE {}".format(*far[:3]),
    )
    assert [sentence for sentence in told if sentence not in text] == []


def test_the_answers_of_the_readme() -> None:
    answers = {row["line"]: row for row in json.loads((RESULTS / "demo/pass_key.json").read_text())}
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/how-to/demo-chat.md"))
    for line, name in (("plain", "plain model"), ("cut", "truncated text"), (NOVEL[2][0], "patched model")):
        assert f"| {name} | `{answers[line]['answer'].strip()}` |" in readme
    assert f"A text of {answers['plain']['prompt_tokens']:,} tokens" in readme
    assert f'ends with "{answers["plain"]["ends_with"]}"' in readme
    for row in answers.values():
        assert f"| `{row['answer']}` | {row['seconds']:.0f} |" in page


@pytest.mark.skipif(older(transformers.__version__, "5.23"), reason="the README counts model types of 5.23")
def test_the_families_of_the_readme() -> None:
    marked = [line for line in zoo.table().splitlines() if "*" in line]
    assert f"{len(marked)} model types pass one suite" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(("model", "column"), [("tinyllama", 1), ("smollm2", 4)])
def test_the_passkeys(model: str, column: int) -> None:
    page = (ROOT / "docs/passkey.md").read_text()
    section = page[page.index("| scheme | TinyLlama 2048 (L)") : page.index("has the task `spans` on")]
    names = {"plain": "plain checkpoint", "yarn": "YaRN", "rerope": "ReRoPE", "self_extend": "Self-Extend"}
    found: dict[tuple[str, int], list[float]] = {}
    for row in Rows(RESULTS / f"passkey/{model}_30.jsonl").rows:
        cell = names[row.line.partition(":")[0]], column + row.length // row.training_length
        found.setdefault(cell, []).extend([row.share] * (row.trials or 0))
    for (name, place), shares in found.items():
        (told,) = re.findall(rf"^\| {name}.*", section, re.MULTILINE)
        assert told.split("|")[place].strip() == f"{round(sum(shares))} of {len(shares)}", name


def test_the_table_of_the_sweep() -> None:
    rows = Rows(RESULTS / "sweep/sweep.jsonl").rows
    chosen = {(display_name(row.line), row.length): f"{row.loss:.3f}" for row in rows if row.texts == rows[0].texts}
    page = (ROOT / "docs/sweep.md").read_text()
    section = page[page.index("| scheme | 1024 | minus reference") : page.index("> Nothing beats")]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "| " in line]
    assert lines[1:]
    for name, at_target, _, _, at_half, _ in lines[1:]:
        assert (at_target, at_half) == (chosen.get((name, 1024)), chosen.get((name, 512))), name
    best, free = lines[1][0], re.search(r"the sliding window \(([\d.]+)\)", page)
    confirmed = {display_name(row.line): row.loss for row in rows if row.texts != rows[0].texts and row.length == 1024}
    assert free
    assert f"{confirmed['sliding window']:.3f}" == free[1]
    assert f"is {confirmed['sliding window'] - confirmed[best]:.3f} below it" in page


def test_the_table_of_the_search() -> None:
    page = (ROOT / "docs/search.md").read_text()
    runs = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if re.match(r"\| \dL, ", line)
    ]
    files = sorted((RESULTS / "search").glob("*.jsonl"))
    assert len(runs) == len(files)
    for file in files:
        rows = Rows(file).rows
        target = max(row.length for row in rows)
        (text,) = {row.texts for row in rows if row.line == "cut" and row.protocol != "last"}
        judged = [row for row in rows if (row.length, row.texts) == (target, text) and row.protocol != "last"]
        yarn, mrrope, found, _ = judged[-4:]  # a list for all lengths, and one with the plain factors up to L
        difference, error = paired_difference(found, yarn)
        told = [f"{row.loss:.3f}" for row in (yarn, mrrope, found)]
        assert [*told, f"{difference:+.3f} ± {error:.3f}"] in [run[2:6] for run in runs], file


def test_the_table_of_the_search_by_layer() -> None:
    page = (ROOT / "docs/search.md").read_text()
    folder = RESULTS / "search/by_layer"
    searched, flat = (Rows(folder / f"4x-seed0{name}.jsonl").rows for name in ("", "-flat"))
    half = {row.texts for row in searched if row.line == "cut"}
    at_target = [row for row in searched if row.length == 1024 and row.texts in half]
    told = {}
    for start, name in (("yarn", "YaRN"), ("mrrope", "MrRoPE"), ("layers", "the curve found")):
        found, ordinary = (
            next(row for row in at_target if row.line.startswith(start) and (row.protocol == "last") == last)
            for last in (False, True)
        )
        told[start] = found, ordinary
        beside = []
        if start != "yarn":
            pairs = zip(told[start], told["yarn"], strict=True)
            beside = ["{:+.3f} ± {:.3f}".format(*paired_difference(*pair)) for pair in pairs]
        assert " | ".join([f"| {name}", f"{found.loss:.3f}", *beside]) in page
    *losses, curve = (next(row for row in flat if row.line.startswith(line)) for line in ("yarn:factor=4.5", "layers"))
    assert f"| YaRN, factor = 4.5 in all layers | {losses[0].loss:.3f} |" in page
    difference, error = paired_difference(curve, losses[0])
    assert f"the curve is {-difference:.3f} ± {error:.3f} below YaRN with 4.5" in page


def test_the_table_of_the_encodings(tmp_path: Path) -> None:
    for name in ("results.jsonl", "costs.jsonl"):
        (tmp_path / name).write_bytes((RESULTS / "encodings" / name).read_bytes())
    assert run_script(encodings_table, ["--folder", tmp_path]) == 0
    table = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| `")]
    shown = [line for line in (ROOT / "docs/encodings.md").read_text().splitlines() if line.startswith("| `")]
    assert len(shown) > 30
    assert [line for line in table if line not in shown] == [line for line in table if line.startswith("| `xl` ")]
    assert set(shown) < set(table)


def ratio(name: str, shown: dict[str, Row]) -> str:
    """Time over plain attention as the page has it."""
    found = shown[f"{name}/bfloat16"].ratio
    assert found is not None, name
    return f"{found:.2f}"


def test_tokens_compiled_ahead() -> None:
    found = json.loads((ROOT / "benchmarks/results/ahead.json").read_text())["tokens"]
    assert "\n".join(ahead.table([ahead.Token(**row) for row in found])) in (ROOT / "docs/benchmarks.md").read_text()
    kernels = {row["scheme"]: row["kernels"] for row in found if row["executor"] is None}
    told = f"starts {kernels['rerope']} generated kernels under ReRoPE, where it started 87 and the unpatched model"
    changes = " ".join((ROOT / "CHANGELOG.md").read_text().split())
    assert f"{told} starts {kernels[None]}" in changes


def test_the_h200() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    now, before = (ResultFile.read(ROOT / f"benchmarks/results/{name}.json") for name in ("h200", "h200_before"))
    found = report.GPU_TABLE.search(page)
    assert found is not None
    assert found[0].strip() == report.gpu_table(now)
    text = " ".join(page[page.index("## On a GPU") : page.index("## On an H100")].split())
    rows, old = ({row.name: row for row in file.rows} for file in (now, before))
    assert all(row.error is None for file in (now, before) for row in file.rows)

    def of(name: str, shown: dict[str, Row] = rows) -> str:
        return ratio(name, shown)

    def line(name: str, *places: str, shown: dict[str, Row] = rows) -> str:
        return " | ".join(["", name, *(of(place, shown) if place else "" for place in places), ""]).strip()

    for told in (
        line("attention alone, 8,192 tokens", "forward/rerope/8192", "forward/dca/8192", shown=old),
        line("attention alone, 32,768 tokens", "forward/rerope/32768", "forward/dca/32768", shown=old),
        line("a compiled token after 8,192", "generate/rerope/8192", "generate/dca/8192", shown=old),
        line("an eager token after 8,192", "token/rerope/grouped/8192", "token/dca/grouped/8192", shown=old),
        line("cuDNN's window", "part/windows/near/8192", "part/windows/near/32768"),
        line("FlashAttention-2", "part/flash/near/8192", "part/flash/near/32768"),
        line("cuDNN in squares", "part/cudnn/near/8192", "part/cudnn/near/32768"),
        line("by region and cuDNN", "executor/merged/rerope/8192", "executor/merged/dca/8192"),
        line("interval masks", "executor/intervals/rerope/8192", "executor/intervals/dca/8192"),
        line("Triton kernel", *(f"executor/fused/{scheme}/8192" for scheme in ("rerope", "dca", "alibi"))),
        line("FlexAttention", "executor/flex/rerope/8192"),
        f"{of('read/dca/8192', old)} instead of {of('read/dca/8192')} for a prompt",
    ):
        assert told in text, told
    assert max(row.value or 0 for row in now.rows if row.name.startswith("value/")) < 0.006
    calls = json.loads((ROOT / "benchmarks/results/h200_profile.json").read_text())["calls"]
    assert f"keeps the host for {calls['forward/rerope/8192']['host']:.2f} ms" in text
    usage = " ".join((ROOT / "docs/how-to/gpu.md").read_text().split())
    for scheme, name in (("ReRoPE", "rerope"), ("Self-Extend", "self_extend"), ("DCA", "dca")):
        assert f"{scheme} {1000 * (rows[f'forward/{name}/32768/bfloat16'].seconds or 0):.1f}" in usage
        assert f"{scheme} {1000 * (rows[f'read/{name}/8192/bfloat16'].seconds or 0):.1f}" in usage
        assert f"{scheme} {1000 * (rows[f'generate/{name}/8192/bfloat16'].seconds or 0) / 64:.2f}" in usage
        assert f"{scheme} {1000 * (rows[f'token/{name}/grouped/8192/bfloat16'].seconds or 0):.2f}" in usage
    assert f"busy for {calls['forward/rerope/8192']['device']:.3f} ms" in usage
    apart = " ".join((ROOT / "docs/how-to/falls-apart.md").read_text().split())
    for place in ("forward/rerope/32768", "forward/dca/32768", "read/rerope/8192", "read/dca/8192"):
        said = f"{1000 * (rows[f'{place}/bfloat16'].seconds or 0):.1f} ms"
        assert f"{said}, {of(place)} times" in apart.replace(" under ReRoPE", "").replace(" under DCA", "")
    readme = " ".join((ROOT / "README.md").read_text().split())
    alone = [of(f"forward/rerope/{length}") for length in (32768, 8192)]
    assert "takes {} times plain attention at 32,768 tokens and {} times at 8,192".format(*alone) in readme
    assert "attention takes {} to {} times as long on an H200".format(*alone) in readme
    tokens = [of("generate/rerope/8192"), of("token/rerope/grouped/8192")]
    assert "takes {} times compiled and {} times eager".format(*tokens) in readme


def test_the_h100() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    text = " ".join(page[page.index("## On an H100") : page.index("## What the GPU kernel needs")].split())
    file = ResultFile.read(ROOT / "benchmarks/results/cuda.json")
    rows = {row.name: row for row in file.rows}
    assert all(row.rounds > 1 and row.error is None for row in file.rows)  # a first call compiles

    def cells(*names: str) -> str:
        return ", ".join(ratio(name, rows) for name in names)

    def span(scheme: str, *places: str) -> str:
        low, high = sorted(ratio(f"decode/{scheme}/{place}", rows) for place in places)
        return f"{low} to {high}"

    alone = cells(*(f"training/{scheme}/32768" for scheme in ("rerope", "leaky_rerope", "self_extend")))
    assert f"not kept, {cells('forward/leaky_rerope/32768', 'forward/self_extend/32768')} | {alone} |" in text
    forward = cells(*(f"module/{scheme}/32768" for scheme in ("rerope", "dca", "logn", "alibi")))
    assert f"| {forward} | {cells('module/rerope/training/32768', 'module/dca/training/32768')} |" in text
    assert f"whole model under YaRN | {ratio('model/yarn/8192', rows)}" in text
    flash = (ratio(f"{name}/plain/32768", rows) for name in ("flash", "flash-training"))
    assert "FlashAttention-2 takes {} forward and {} with backward".format(*flash) in text
    decoded = [span(scheme, "grouped/32768", "4096") for scheme in ("rerope", "self_extend", "dca")]
    assert ", ".join([*decoded, span("xpos", "32768", "4096")]) in text
    assert f"one large matrix product {file.ceiling['bfloat16']:.0f}" in text
    for name, work in (
        ("kernel/rerope", "ReRoPE, forward"),
        ("kernel/dca", "DCA, forward"),
        ("kernel-training/rerope", "ReRoPE, with backward"),
    ):
        row = rows[f"{name}/32768/bfloat16"]
        regions, kernel = (round(1000 * (seconds or 0)) for seconds in (row.seconds, row.yardstick_seconds))
        assert f"| {work} | {regions} | {kernel} |" in text
    done = {name: part["result"] for name, part in json.loads((RESULTS / "gpu/h100.json").read_text())["done"].items()}
    served, without = (done[f"serve/plain{how}"]["tokens_per_second"] for how in ("", " without cuDNN"))
    assert f"wrote {served:.0f} tokens a second in a batch of 16 after 2,048, and {without:.0f} after" in text
    yarn, rerope = (done[f"finetune/{scheme}"] for scheme in ("yarn:target=32768", "rerope:window=4096"))
    trained = "{:,} tokens a second under YaRN, {:,} under ReRoPE"
    assert trained.format(*(round(each["tokens_per_second"], -2) for each in (yarn, rerope))) in text
    real = " ".join((ROOT / "docs/real.md").read_text().split())
    before, after = (rerope[when]["repeat"][0] for when in ("before", "after"))
    cut = done["far/plain"]["repeat, cut at L"][0]
    assert f"from {before:.2f} to {after:.2f} under ReRoPE at 4L, where truncated text is at {cut:.2f}" in real
