"""Takes the package from where it is: `rope_patch/doctor` in a checkout, `rope_doctor` in an unpacked sdist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Hook(BuildHookInterface):
    """Gives the package the name `rope_doctor`, unless it has that name already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build; `version` is `editable` under `pip install -e`."""
        package = Path(self.root, "rope_doctor")
        if package.exists():
            return
        source = Path(self.root).parent / "rope_patch" / "doctor"
        if version == "editable":  # Python finds an editable package by the name of its folder
            package.symlink_to(source, target_is_directory=True)
        else:
            build_data["force_include"][str(source)] = package.name
