"""The client's own control variate of SCAFFOLD, which belongs to its newest accepted update and is never sent.

    control.safetensors     c_i, which the newest accepted update has left, [num_parameters] float32
    update.control          what the update in the spool leaves

The metadata of both files name the run, the line of rounds (`Control.line`), and the update that has left the values.
`Spool` decides when the second file replaces the first, namely when the server has accepted the update. A file of
another line is not used. Which update has left the values goes into the next update's header, so that the server
notices if they were lost or put back.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedring.client.transfer.tensor_files import save_private
from fedring.daemon.durable import sync

log = logging.getLogger(__name__)

_KEY = "control"


@dataclass(frozen=True, slots=True, eq=False)
class OwnControl:
    """A control variate of this client."""

    line: str  # of the rounds in which it was built up
    left_by: str  # the name of an update
    values: NDArray[np.float32]  # [num_parameters]


class ControlState:
    """The files of control variates in one state folder, which the caller has locked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "control.safetensors"
        self._update_file = folder / "update.control"

    def load(self, run_id: str, line: str, size: int) -> OwnControl | None:
        """Return the control variate that a round begins with; None if there is none of its line.

        Args:
            run_id: The run.
            line: The line of the round.
            size: The number of parameters.
        """
        try:
            with safe_open(self._file, framework="numpy") as file:
                metadata = file.metadata() or {}
                if (metadata.get("run"), metadata.get("line")) != (run_id, line):
                    return None
                values = np.asarray(file.get_tensor(_KEY))
                if values.shape != (size,) or values.dtype != np.float32 or not np.isfinite(values).all():
                    raise ValueError(f"not {size} finite values of float32")
                return OwnControl(line, metadata["update"], values)
        except FileNotFoundError:
            return None
        except (SafetensorError, KeyError, ValueError) as error:
            log.warning("the control variate in %s is damaged and not used: %s", self._file, error)
            return None

    def spool(self, control: OwnControl, run_id: str) -> None:
        """Write the control variate that the update leaves which is about to be spooled, durably."""
        metadata = {"run": run_id, "line": control.line, "update": control.left_by}
        save_private(save_file, self._update_file, {_KEY: control.values}, metadata)
        sync(self._update_file)

    def accept(self) -> None:
        """Make the control variate of the spooled update that of the client, durably, unless it became that before.

        If a power loss has left the file of another update, the server notices that with the next update.
        """
        if self._update_file.exists():
            self._update_file.rename(self._file)
            sync(self._folder)

    def drop(self) -> None:
        """Drop the control variate of the spooled update."""
        self._update_file.unlink(missing_ok=True)
