"""The floors of the package: a module may know those on its own floor and below it."""

from __future__ import annotations

FLOORS = [
    {"doctor", "errors", "graphs", "json_files", "naming", "shipped", "typing", "version"},
    {"schemes"},
    {"attention"},
    {"models"},
    {"mounting"},
    {"context_parallel"},
    {"patching"},
    {"saving", "description", "explaining", "ranking"},
    {"api", "data"},
    {"evaluation", "serving"},
    {"training"},
    {"cli", "__main__"},
]
"""Parts of the package from the ground up; none imports from a floor above it, and none calls a function there."""


def floor_of(module: str) -> int:
    """The floor of a module, such as `rope_patch.models.base`."""
    part = module.split(".")[1]
    found = [index for index, floor in enumerate(FLOORS) if part in floor]
    assert found, f"{module} belongs to no layer"
    return found[0]
