"""What NVFlare's server does besides: notes of the times of the rounds. It needs an environment with nvflare."""

import importlib
import json
import time
from pathlib import Path
from typing import Any

event_type: Any = importlib.import_module("nvflare.app_common.app_event_type").AppEventType
component: Any = importlib.import_module("nvflare.apis.fl_component").FLComponent


class Times(component):  # type: ignore[misc]
    """Writes `rounds.json` to a folder, with the beginnings and ends of the rounds.

    Args:
        out: The folder.
    """

    def __init__(self, out: str) -> None:
        super().__init__()
        self.out = out
        self._rounds: list[dict[str, float]] = []

    def handle_event(self, event: str, context: Any) -> None:
        """Note the time."""
        if event == event_type.ROUND_STARTED:
            self._rounds.append({"began": time.time()})
        elif event == event_type.AFTER_AGGREGATION:
            trained = []
            for path in Path(self.out).glob(f"trained-{len(self._rounds)}-*.json"):
                trained.append(json.loads(path.read_text()))
            self._rounds[-1] |= {"ended": time.time(), "train": max(trained, default=0.0), "updates": len(trained)}
        else:
            return
        (Path(self.out) / "rounds.json").write_text(json.dumps(self._rounds))
