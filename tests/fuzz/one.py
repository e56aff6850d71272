"""Feed one decoder, with coverage of fedring's code: `python -m tests.fuzz.one TARGET FOLDER SECONDS`."""

import hashlib
import sys
import warnings
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

atheris: Any = import_module("atheris")  # only `make fuzz` installs it

with atheris.instrument_imports(include=["fedring"]):
    from tests.fuzz.targets import target_of


def main(name: str, folder: Path, seconds: int) -> None:
    """Feed the decoder until the time is over or something is found; does not return."""
    warnings.simplefilter("ignore")  # torch warns of files that it does not know
    with atheris.instrument_imports(include=["fedring"]):
        target = target_of(name)
    corpus = folder / "corpus" / name
    found = folder / "found" / name
    for each in (corpus, found):
        each.mkdir(parents=True, exist_ok=True)
    for example in target.examples:
        (corpus / hashlib.sha256(example).hexdigest()[:16]).write_bytes(example)

    def mutator(data: bytes, size: int, seed: int) -> bytes:
        random = Random(seed)
        changed = target.mutate(data, random) if random.random() < 0.8 else bytes(atheris.Mutate(data, size))
        return changed[:size]

    options = [f"-max_total_time={seconds}", f"-artifact_prefix={found}/", "-max_len=131072", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], str(corpus), *options], target.survives, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
