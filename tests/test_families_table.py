"""docs/families.md agrees with the library."""

from pathlib import Path

import pytest
import transformers

from tests.families import FAMILIES
from tests.families_table import passing, table, version

DOCUMENT = (Path(__file__).parents[1] / "docs" / "families.md").read_text()

same_version = pytest.mark.skipif(
    transformers.__version__ != version(DOCUMENT), reason="written with another version of Transformers"
)


@same_version
def test_the_families_of_the_suite_are_those_that_pass():
    assert passing(DOCUMENT) == {values["model_type"] for values in FAMILIES.values()}


@same_version
@pytest.mark.nightly
def test_the_document_is_what_the_library_does():
    assert table() == DOCUMENT
