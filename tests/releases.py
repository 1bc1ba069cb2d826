"""Marks for tests of what older releases of torch and Transformers get wrong themselves, with no patch."""

from __future__ import annotations

from types import ModuleType

import pytest

from rope_patch.doctor.versions import older


def since(package: ModuleType, version: str, fault: str) -> pytest.MarkDecorator:
    """Run a test from this version of a package on, before which it has the fault."""
    reason = f"{package.__name__} {package.__version__} {fault}"
    return pytest.mark.skipif(older(package.__version__, version), reason=reason)
