"""The benchmarks measure what they say, and lose nothing; what they find is not tested here."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import attention, candidates, fine_tuning, launches, peers, perplexity, report, run
from benchmarks.attention import SEGMENTS, regions, spec
from benchmarks.catalogue import growth_makers, growth_shapes, rows
from benchmarks.comparison import Comparison, Figure, Shape, Side
from benchmarks.dense import two_matrices
from benchmarks.measure import Patience, in_turn, peak_bytes
from benchmarks.results import Point, ResultFile, Row
from rope_patch.attention.executors import reference
from rope_patch.attention.problem import Problem
from rope_patch.attention.terms import DistanceBias
from rope_patch.attention.turner import Branch
from rope_patch.schemes.alibi import ALiBi
from rope_patch.schemes.registry import as_scheme

ROOT = Path(__file__).parents[1]
ONCE = Patience(0.0, least=1)
ROWS = rows("cpu")
FACTS = {
    "machine": {"device": "cpu", "processor": "a", "cores": 2, "threads": 1, "memory_gib": 1.0, "gpu": None},
    "versions": {"torch": "2"},
    "environment": {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": None},
}


def nothing(shape: Shape) -> Side:
    return Side(lambda: None)


def megabytes(shape: Shape, count: int) -> Side:
    return Side(lambda: torch.ones(count, 2**18))


def comparison(name: str = "a/b", **changes) -> Comparison:
    return Comparison(name, "work", "yardstick", nothing, nothing, Shape(8), **{"target": 1.1, **changes})


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_two_dense_matrices_are_rerope(kv_heads):
    shape = Shape(40, 4, kv_heads, 16)
    near, far = [(shape.random(1, 4, 40, 16), shape.random(1, kv_heads, 40, 16)) for _ in range(2)]
    value = shape.random(1, kv_heads, 40, 16)
    within, beyond, _ = as_scheme(("rerope:window=7",), {}).segments()
    positions = torch.arange(40)[None]
    inputs = Problem(
        branches=(Branch(within, *near), Branch(beyond, *far)),
        value=value,
        query_positions=positions,
        key_positions=positions,
        mask=None,
        causal=True,
        query_start=0,
        scaling=16**-0.5,
    )
    torch.testing.assert_close(two_matrices(near, far, value, 7), reference.attend(inputs)[0])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_runs(row, monkeypatch):
    for module in (fine_tuning, perplexity):
        monkeypatch.setattr(module, "_VOCABULARY", 500)
    # one is compiled, in a second and not in a minute; tests/contract/test_compile.py compiles models under each scheme
    compiled = functools.partial(torch.compile, backend="eager") if "/rerope/" in row.name else lambda model: model
    monkeypatch.setattr(torch, "compile", compiled)
    small = dataclasses.replace(row.small(), memory_target=None)
    found = run.measured(small, ONCE)
    assert found.error is None
    assert found.rounds == 1


@pytest.mark.parametrize("scheme", SEGMENTS)
def test_segment_schemes_are_measured_on_the_path_of_long_texts(scheme, monkeypatch):
    monkeypatch.setattr("rope_patch.attention.executors.chunked.reference.attend", pytest.fail)
    assert regions(Shape(8192, 2, 2, 16).small(), scheme).run().shape == (1, 2, 640, 16)


@pytest.mark.parametrize("scheme", SEGMENTS)
def test_flex_attention_by_region_is_the_oracle(scheme):
    shape = Shape(200, 4, 2, 16)
    inputs = attention.in_regions(shape, scheme, backward=False)
    masks = [candidates.block_mask(branch.region, shape) for branch in inputs.branches]
    found = candidates.by_flex(inputs, masks, flex_attention)
    torch.testing.assert_close(found, reference.attend(inputs)[0], atol=1e-5, rtol=1e-5)


def test_alibi_by_flex_attention_is_the_oracle():
    shape = Shape(200, 4, 2, 16)
    numbers = torch.get_rng_state()
    found = candidates.alibi(shape, "flex").run()
    torch.set_rng_state(numbers)
    query, key, value = (shape.random(1, heads, 200, 16) for heads in (4, 2, 2))
    positions = torch.arange(200)[None]
    bias = DistanceBias(lambda distance: ALiBi().bias(distance, 4))
    inputs = Problem((Branch(None, query, key),), value, positions, positions, None, True, 0, 0.25, bias)
    torch.testing.assert_close(found, reference.attend(inputs)[0], atol=1e-5, rtol=1e-5)


def test_the_rows_of_a_device_have_names_of_their_own(monkeypatch):
    monkeypatch.setattr("benchmarks.catalogue.memory_bytes", lambda device: 2**36)
    for device in ("cpu", "cuda"):
        names = [row.name for row in rows(device)]
        assert len(set(names)) == len(names)
        assert all(row.shape.device == device for row in rows(device))
        for shape in growth_shapes(device):
            assert shape.device == device
            assert len(growth_makers(shape)) in ((3, 4) if device == "cuda" else (2, 3))


def test_dense_matrices_are_left_out_where_they_do_not_fit(monkeypatch):
    monkeypatch.setattr("benchmarks.catalogue.memory_bytes", lambda device: 2**20)
    assert list(growth_makers(Shape(8192))) == ["plain attention", "ReRoPE"]


@pytest.mark.parametrize("scheme", SEGMENTS)
def test_a_scheme_has_settings_at_every_length(scheme):
    for length in (256, 8192, 131072):
        as_scheme((spec(scheme, length),), {})


def test_sides_run_in_turn_and_the_warm_up_does_not_count():
    calls = []
    sides = [
        Side(functools.partial(calls.append, "a"), functools.partial(calls.append, "reset")),
        Side(functools.partial(calls.append, "b")),
    ]
    times = in_turn(sides, "cpu", Patience(0.1, least=2, most=2))
    assert calls == ["reset", "a", "b"] * 3
    assert [len(side) for side in times] == [2, 2]


def test_peak_memory_is_that_of_the_run():
    assert peak_bytes(functools.partial(megabytes, count=64), Shape(8)) == pytest.approx(64 * 2**20, rel=0.1)


def test_memory_of_work_that_both_sides_share_is_taken_off():
    ours, yardstick, shared = (functools.partial(megabytes, count=count) for count in (96, 160, 32))
    row = dataclasses.replace(comparison(), ours=ours, yardstick=yardstick, shared=shared)
    assert run.extra_bytes(row) == [pytest.approx(count * 2**20, rel=0.1) for count in (64, 128)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_losses_of_a_fine_tuning_step_are_one(dtype):
    shape = Shape(48, 2, 2, 16, dtype)
    ours, yardstick = (maker(shape).run() for maker in (fine_tuning.chunked_loss, fine_tuning.default_loss))
    torch.testing.assert_close(ours, yardstick, rtol=1e-3, atol=0, check_dtype=False)


def test_a_row_says_what_was_measured_and_whether_it_is_enough():
    row = Row.of(comparison(memory_target=3.0, flops=lambda shape: 1e12), [[1.0, 3.0, 2.0], [1.0, 2.0, 4.0]], [50, 10])
    assert (row.ratio, row.seconds, row.yardstick_seconds, row.rounds) == (1.0, 2.0, 2.0, 3)
    assert row.spread == (0.75, 1.25)
    assert (row.tflops, row.memory_ratio) == (0.5, 5.0)
    assert row.met is False
    assert Row.of(comparison(), [[1.0], [1.0]]).met is True
    assert Row.of(comparison(target=None), [[1.0], [1.0]]).met is None


def test_a_figure_says_what_was_read_and_whether_it_is_little_enough():
    figure = Figure("patch/a", "patching", "", "s", lambda shape: (0.5, None), Shape(8), 0.3)
    row = Row.of_figure(figure, [(0.2, None), (0.1, None), (0.9, None)])
    assert (row.value, row.spread, row.met) == (0.2, pytest.approx((0.15, 0.55)), True)
    assert report.cells(row)[2:4] == ("0.2 s [0.150, 0.55]", "0.3")
    count = Row.of_figure(dataclasses.replace(figure, unit="a layer", target=8), [(29, 36)])
    assert report.cells(count)[2:4] == ("29 a layer, beyond 36", "8")
    assert count.met is False


def test_kernels_are_counted_by_layer_and_views_are_none(monkeypatch):
    def decoding(shape: Shape, scheme: str | None, layers: int) -> Side:
        def run() -> None:
            x = torch.ones(2, 2)
            for _ in range(layers):
                x = (x.mT @ x).view(4)[None].reshape(2, 2).add_(1)
                x = -x if scheme else x
            bool(x.any())
            x.tolist() if scheme else None

        return Side(run)

    monkeypatch.setattr(launches, "decoding", decoding)
    assert launches.per_layer(Shape(8), "a") == (1, 2)
    assert launches.waits(Shape(8), "a") == (1, 1)


def test_biases_of_a_table_are_those_of_every_pair():
    gradients = []
    for maker in (attention.t5_encoder, attention.materialised_encoder):
        torch.manual_seed(0)
        gradients.append(maker(Shape(640, 2, 2, 16), backward=True).run())
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("page", "table"),
    [
        ("docs/benchmarks.md", lambda: report.headline(*of_processors())),
        ("benchmarks/peers.md", lambda: peers.table(json.loads(peers.RESULTS.read_text())["rows"])),
    ],
)
def test_pages_have_the_figures_of_the_files(page, table):
    assert report.TABLE.search((ROOT / page).read_text())[0].strip() == table()


def test_the_readme_gives_the_figures_of_attention_alone_and_of_the_module():
    told = " ".join((ROOT / "README.md").read_text().split())
    names = ("forward/rerope", "module/rerope", "module/rerope/training")
    figures = []
    for file in of_processors():
        assert file.facts["machine"]["processor"] in told
        ratios = {row.name: row.ratio for row in file.rows}
        figures.append([f"{ratios[f'{name}/8192/float32']:.2f}" for name in names])
    (alone, module, training), others = figures
    assert f"takes {alone} times plain attention, {module} times with rotations" in told
    assert f"and {training} times with backward ({others[0]}, {others[1]} and {others[2]} on an AMD EPYC)" in told


def of_processors():
    return [ResultFile.read(report.RESULTS / name) for name in report.PROCESSORS]


def test_results_come_back_from_disk(tmp_path):
    file = ResultFile(tmp_path / "cpu.json", FACTS)
    file.ceiling["float32"] = 0.1
    entries = [Row.of(comparison(), [[1.0, 2.0], [1.0, 2.0]], [3, 1]), Row.failed(comparison("c"), ValueError("x\ny"))]
    point = Point("ReRoPE", 1024, "1024 tokens, 2 heads", 0.1, 2**20, "code")
    file.put(*entries, point)
    found = ResultFile.read(file.path)
    assert (found.rows, found.points, found.facts, found.ceiling) == (entries, [point], FACTS, {"float32": 0.1})
    assert found.rows[1].error == "ValueError: x"
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.json"]
    json.loads(file.path.read_text(), parse_constant=pytest.fail)


def test_rows_of_another_machine_are_not_added_to(tmp_path):
    file = ResultFile(tmp_path / "cpu.json", FACTS)
    file.put(Row.of(comparison(), [[1.0], [1.0]]))
    assert ResultFile.continued(file.path, FACTS).has(comparison())
    assert not ResultFile.continued(file.path, {**FACTS, "versions": {"torch": "3"}}).rows
    assert not ResultFile.continued(tmp_path / "missing.json", FACTS).rows


def test_a_row_that_failed_or_is_of_another_commit_is_measured_again(tmp_path):
    file = ResultFile(tmp_path / "cpu.json", FACTS)
    file.put(Row.failed(comparison("failed"), ValueError()))
    file.put(dataclasses.replace(Row.of(comparison("older"), [[1.0], [1.0]]), commit="of last week"))
    assert not file.has(comparison("failed"))
    assert not file.has(comparison("older"))


def test_a_row_that_fails_is_a_row(tmp_path):
    def broken(shape: Shape) -> Side:
        raise RuntimeError("out of memory")

    rows = [dataclasses.replace(comparison("broken"), ours=broken), comparison("fine")]
    file = ResultFile(tmp_path / "cpu.json", FACTS)
    run.run(file, rows, ONCE)
    failed, fine = file.rows
    assert (failed.name, failed.error, failed.met) == ("broken", "RuntimeError: out of memory", False)
    assert fine.error is None
    assert "broken failed: RuntimeError" in report.markdown(file)


def test_an_interrupted_run_keeps_its_rows_and_goes_on(tmp_path, monkeypatch, capsys):
    rows = [comparison("first"), comparison("second")]
    measured, seen = run.measured, []

    def interrupted_once(row: Comparison, patience: Patience) -> Row:
        seen.append(row.name)
        if seen == ["first", "second"]:
            raise KeyboardInterrupt
        return measured(row, patience)

    monkeypatch.setattr(run, "measured", interrupted_once)
    monkeypatch.setattr(run, "jobs_for", lambda *_: rows)
    arguments = ["--out", str(tmp_path), "--seconds", "0"]
    assert run.main(arguments) == 130
    assert [row.name for row in ResultFile.read(tmp_path / "cpu.json").rows] == ["first"]
    assert run.main([*arguments, "--resume"]) == 0
    assert [row.name for row in ResultFile.read(tmp_path / "cpu.json").rows] == ["first", "second"]
    assert seen == ["first", "second", "second"]
    assert "second" in capsys.readouterr().out


def test_a_row_within_which_a_run_was_cut_comes_last(tmp_path):
    file = ResultFile(tmp_path / "cpu.json", FACTS)
    file.begin("hangs")
    file = ResultFile.continued(file.path, FACTS)
    assert list(file.unfinished) == ["hangs"]
    run.run(file, [comparison("hangs"), comparison("fine")], ONCE)
    assert [row.name for row in file.rows] == ["fine", "hangs"]
    assert not ResultFile.read(file.path).unfinished


def test_a_quick_run_from_the_command_line(tmp_path, capsys):
    assert run.main(["--quick", "--only", "forward/rerope", "growth", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "forward/rerope/8192/float32" in shown
    assert (tmp_path / "cpu.png").stat().st_size > 10_000
    assert {point.line for point in ResultFile.read(tmp_path / "cpu.json").points} == set(
        growth_makers(Shape(8).small())
    )


def test_names_and_devices_that_are_not_there(capsys, monkeypatch):
    assert run.main(["--only", "flight"]) == 2
    assert "flight" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_report_without_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path / "none.json")])
    assert report.main() == 2
    assert "none.json" in capsys.readouterr().err
