"""How long this process took to start."""

import time
from pathlib import Path

_STARTED = 19  # field of /proc/self/stat after the name, which may hold spaces: clock ticks since the boot
_TICKS = 100.0  # a second, on every Linux


def startup_seconds() -> float:
    """Return the seconds since this process was started; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTED]) / _TICKS)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
