"""Files that are whole or as they were, whatever interrupts the writing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: str | Path, *, sole_writer: bool = False, durable: bool = False) -> Iterator[Path]:
    """A path beside a file to write to; what stands there takes the file's place when the `with` block ends.

    Args:
        path: of the file.
        sole_writer: whether no other process writes this file. Then what a killed process left aside is overwritten by
            the next one, and does not stay.
        durable: whether it is on the disk before it takes the place, or after a power failure the name could be there
            and the content not.

    Yields:
        the path aside.

    Raises:
        OSError: it cannot be written, and the error names the file; one that was there before still is.
    """
    target = Path(path).resolve()  # of a link, not the link itself
    aside = target.with_name(f"{target.name}.tmp" if sole_writer else f"{target.name}.{os.getpid()}.tmp")
    try:
        yield aside
        if durable:
            with aside.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(aside, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        aside.unlink(missing_ok=True)
