"""Unit files, as far as the tests read them."""

import re
from pathlib import Path

from tests.conftest import ROOT

UNITS = ROOT / "deploy" / "systemd"


class Unit:
    """What a unit file says; a key that is given more than once has all its values."""

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
        """A time span, as these units write it."""
        found = re.fullmatch(r"(\d+)(s|min)", self[key])
        assert found, self[key]
        return int(found[1]) * {"s": 1, "min": 60}[found[2]]
