"""The random cases leave nothing out: every scheme is among them, and every field with a value that a model takes."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import torch

from rope_patch import InvalidField, Scheme, list_schemes, patch
from rope_patch.schemes import registry, scheme_class
from rope_patch.schemes.rules import Above, AtLeast, NumbersAboveZero, SomeOf
from rope_patch.typing import NO_WEIGHTS
from tests.cases import CASES, declared, home_of, settings_of, what_is_missing
from tests.hardening.exploring import explore
from tests.hardening.legal import LONGEST, named
from tests.hardening.scale import cases
from tests.runs import logits, tokens


def drawn_fields(name: str) -> dict[str, Scheme]:
    """By field, a drawn scheme in which it is not the default."""
    found: dict[str, Scheme] = {}

    def look(scheme: Scheme) -> None:
        for field in dataclasses.fields(scheme):  # type: ignore[arg-type]
            if getattr(scheme, field.name) != field.default:
                found.setdefault(field.name, scheme)

    for part in range(4):
        explore(named(name, pairs=8, heads=4), look, cases(usual=15, hard=30), part)
        if not left_out(name, found):
            break
    return found


def left_out(name: str, found: dict[str, Scheme]) -> set[str]:
    """The fields of a scheme that were not drawn."""
    return {field.name for field in dataclasses.fields(scheme_class(name))} - found.keys()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list_schemes())
def test_every_field_is_drawn_and_a_model_takes_it(llama, name):
    found = drawn_fields(name)
    assert left_out(name, found) == set(declared(name, "UNDRAWN", []))
    for scheme in found.values():
        with patch(llama, scheme):
            assert logits(llama, tokens(LONGEST)).isfinite().all()


# --- a scheme that is new --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class New(Scheme):
    """Fields of every type, under names that other schemes have for other things."""

    name = "new"

    seed: Annotated[float, Above(0)]
    window: Annotated[tuple[float, ...], NumbersAboveZero("head")]
    terms: Annotated[tuple[str, ...], SomeOf(("one", "other"))] = ("one", "other")
    factor: Literal["first", "second"] = "first"
    base: bool | None = None
    clip: Annotated[int, AtLeast(7)] | None = None

    def query_scale(self, positions, num_heads, weights=NO_WEIGHTS):
        return torch.ones_like(positions, dtype=torch.float32)[None]


@pytest.fixture
def register(monkeypatch):
    """What the author of a scheme does: give it its name, and settings in its tests."""

    def registered(cls: type[Scheme], case: str | None = None) -> str:
        monkeypatch.setitem(registry._REGISTRY, cls.name, cls)
        if case is not None:
            monkeypatch.setitem(CASES, cls.name, case)
        return cls.name

    return registered


def test_a_new_scheme_is_drawn_without_further_ado(register):
    name = register(New, "new:seed=3.5,window=[1.5,2,3]")
    assert left_out(name, drawn_fields(name)) == set()


def test_a_new_scheme_without_settings_is_told_where_they_are_missing(register):
    name = register(New)
    with pytest.raises(AssertionError, match=r'CASES = \["new:FIELD=VALUE"\] to tests/schemes/test_test_legal\.py'):
        drawn_fields(name)


@pytest.mark.parametrize("name", list_schemes())
def test_every_scheme_has_settings_in_its_own_tests(name):
    assert settings_of(name), what_is_missing(name)
    assert CASES[name] == settings_of(name)[0]


def test_no_settings_stand_where_nobody_reads_them():
    known = {home_of(name) for name in list_schemes()}
    for path in (Path(__file__).parents[1] / "schemes").glob("test_*.py"):
        if re.search(r"^CASES\b", path.read_text(), re.MULTILINE):
            assert path in known
    for name in list_schemes():
        homes = {home_of(spec.partition(":")[0]) for spec in declared(name, "CASES", [])}
        assert homes == {home_of(name)}


def test_a_field_of_which_no_value_is_legal_is_named(register):
    class Refusing(New):
        def __post_init__(self) -> None:
            super().__post_init__()
            if self.clip is not None:
                raise InvalidField("new: clip is not allowed")

    name = register(Refusing, "new:seed=3.5,window=[1.5,2,3]")
    assert left_out(name, drawn_fields(name)) == {"clip"}


def test_a_field_without_a_rule_is_named(register):
    @dataclass(frozen=True)
    class Strange(New):
        table: int = 3

    name = register(Strange, "new:seed=3.5,window=[1.5,2,3]")
    with pytest.raises(
        AssertionError, match=r"new: table has no rule; write one into its annotation, such as .*AtLeast\(1\)"
    ):
        drawn_fields(name)
