"""Folders appear complete, whatever runs that were killed left behind."""

from __future__ import annotations

import pytest

from rope_patch.training.checkpoints import whole_folder


def write(path, content, error=None):
    with whole_folder(path) as folder:
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text(content)
        if error is not None:
            raise error


def names(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("left", ["checkpoint-5/of a killed run", "checkpoint-4/of a killed run", "a file"])
def test_nothing_of_a_run_that_was_killed_gets_into_a_folder_or_stays_beside_it(left, tmp_path):
    rest = tmp_path / "unfinished" / left
    rest.parent.mkdir(parents=True)
    rest.write_text("old")
    write(tmp_path / "checkpoint-5", "new")
    assert names(tmp_path) == ["checkpoint-5/weights"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


def test_a_folder_is_replaced_as_a_whole_and_only_when_the_new_one_is_complete(tmp_path):
    path = tmp_path / "checkpoint-5"
    path.mkdir()
    (path / "old").write_text("old")
    with pytest.raises(OSError, match="checkpoint-5 cannot be written: no space"):
        write(path, "half", OSError("no space"))
    assert names(tmp_path) == ["checkpoint-5/old"]
    write(path, "new")
    assert names(tmp_path) == ["checkpoint-5/weights"]
    assert (path / "weights").read_text() == "new"
