"""All decoders under fuzz. A new decoder is added to the list of its side, and to nothing else."""

from tests.fuzz.disks import disk_targets
from tests.fuzz.target import Target
from tests.fuzz.wires import wire_targets


def all_targets() -> dict[str, Target]:
    """Return the decoders by name."""
    return {**wire_targets(), **disk_targets()}
