"""The services of a compose file, without containers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.deploy.on_this_host import Translator

DOCKER = ROOT / "deploy" / "docker"


class Containers:
    """Runs each service's command on this host: volumes are folders, and each container has its own paths."""

    def __init__(self, folder: Path, services: Mapping[str, Mapping[str, Any]]) -> None:
        self.folder, self.services, self.translator = folder, services, Translator()

    def command(self, name: str, *arguments: str) -> list[str]:
        """Return the command that the container would run."""
        service = self.services[name]
        words = [*service.get("entrypoint", []), *(arguments or service["command"])]
        words = [str(DOCKER / word) if word == "run-daemon" else word for word in words]
        return [self.translator.translate(word, self.paths(name), name) for word in words]

    def env(self, name: str) -> dict[str, str]:
        """Return the container's environment."""
        given = self.services[name].get("environment", {})
        return {key: self.translator.translate(value, self.paths(name), name) for key, value in given.items()}

    def check(self, name: str) -> list[str]:
        """Return the command of the container's health check."""
        return [self.translator.translate(word, {}, name) for word in self.services[name]["healthcheck"]["test"][1:]]

    def paths(self, name: str) -> dict[str, Path]:
        """Create the container's files and folders; return their places on this host by the container's paths."""
        paths = {"/certs": self.folder / "certs"} if name == "certs" else {}
        for mount in self.services[name]["volumes"]:
            if mount["type"] == "volume":
                place = self.folder / mount["source"]
                place.mkdir(mode=0o700, exist_ok=True)
                if mount["target"].startswith("/certs/"):
                    self._link(self.folder / mount["target"].removeprefix("/"), place)
            else:
                place = self.folder / f"{name}-{Path(mount['source']).name}"
            paths[mount["target"]] = place
        for mount in self.services[name]["volumes"]:
            if mount["type"] == "bind":
                text = (DOCKER / mount["source"]).read_text()
                translated = text if mount["source"].endswith(".sh") else self.translator.translate(text, paths, name)
                paths[mount["target"]].write_text(translated)
        return paths

    @staticmethod
    def _link(at: Path, place: Path) -> None:
        at.parent.mkdir(exist_ok=True)
        if not at.exists():
            at.symlink_to(place)
