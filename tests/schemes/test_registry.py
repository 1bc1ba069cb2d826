"""Names of schemes: one class each, and the newest definition of it."""

import dataclasses

import pytest

from rope_patch import InvalidField, ReRoPE, get_scheme, register_scheme
from rope_patch.schemes import registry


@pytest.fixture(autouse=True)
def _registry_of_its_own(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def define(name, qualname, default):
    """A scheme like ReRoPE, as a cell of a notebook defines one."""
    namespace = {"name": name, "__module__": "__main__", "__qualname__": qualname, "__annotations__": {"window": int}}
    return dataclasses.dataclass(frozen=True)(type(qualname, (ReRoPE,), {**namespace, "window": default}))


def test_a_definition_may_be_run_again():
    register_scheme(define("mine", "Mine", 4))
    newer = register_scheme(define("mine", "Mine", 8))
    assert get_scheme("mine") == newer(window=8)


def test_the_name_of_another_class_is_refused():
    register_scheme(define("mine", "Mine", 4))
    for taken in ("mine", "rerope"):
        with pytest.raises(InvalidField, match=f"'{taken}' belongs to "):
            register_scheme(define(taken, "Another", 4))
    assert get_scheme("rerope", window=4) == ReRoPE(window=4)
