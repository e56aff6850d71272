"""The parts of unit files that the tests read."""

import re
from pathlib import Path

from tests.conftest import ROOT

UNITS = ROOT / "deploy" / "systemd"


class Unit:
    """The keys of a unit file; a repeated key has all its values."""

    def __init__(self, path: Path) -> None:
        self.values: dict[str, list[str]] = {}
        text = path.read_text().replace("\\\n", " ")
        for line in text.splitlines():
            if found := re.fullmatch(r"(\w+)=(.*)", line):
                self.values.setdefault(found[1], []).append(found[2].strip())

    def __getitem__(self, key: str) -> str:
        (value,) = self.values[key]
        return value

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def seconds(self, key: str) -> float:
        """Return a time span in seconds."""
        found = re.fullmatch(r"(\d+)(s|min)", self[key])
        assert found, self[key]
        return int(found[1]) * {"s": 1, "min": 60}[found[2]]
