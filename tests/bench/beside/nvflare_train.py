"""The client of NVFlare's job: it trains in the process of the job until the job ends.

It needs an environment with nvflare and torch, and tests/bench/beside in its path.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

flare: Any = importlib.import_module("nvflare.client")
work: Any = importlib.import_module("work")


def main(cell: str, root: str, clients: int, out: str) -> None:
    """Train each round."""
    torch.set_num_threads(1)
    flare.init()
    name = flare.get_site_name()
    part = int(name.removeprefix("site-")) - 1
    model = work.network(cell)
    while flare.is_running():
        told = flare.receive()
        if told is None:
            break
        model.load_state_dict({key: torch.as_tensor(value) for key, value in told.params.items()})
        number = told.current_round + 1
        samples, seconds = work.train(cell, model, root, part, clients, number)
        (Path(out) / f"trained-{number}-{part}.json").write_text(json.dumps(seconds))
        weight = {"NUM_STEPS_CURRENT_ROUND": samples}
        flare.send(flare.FLModel(params=model.state_dict(), metrics={"seconds": seconds}, meta=weight))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
