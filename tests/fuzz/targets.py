"""All that is fed. A new decoder is added to the list of its side, and to nothing else."""

from tests.fuzz.disks import disk_targets
from tests.fuzz.target import Target
from tests.fuzz.wires import wire_targets

CALLS = "calls"


def decoders() -> dict[str, Target]:
    """Return the decoders by name."""
    return {**wire_targets(), **disk_targets()}


def target_of(name: str) -> Target:
    """Return the decoder of this name, or the calls of a whole server."""
    if name != CALLS:
        return decoders()[name]
    from tests.fuzz.calls import call_target  # with coverage, the import of a server takes a minute

    return call_target()
