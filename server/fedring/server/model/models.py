"""One object for models: their versions, their making, their downloads.

The other rooms use it for all that they do with models.
"""

import threading
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from fedring.server.aggregation.versions import ModelVersions
from fedring.server.config import ServerConfig
from fedring.server.model.downloads import Downloads
from fedring.server.state.blob_interfaces import Blobs

if TYPE_CHECKING:
    from fedring.server.model.making import ModelMaker


class Models:
    """The models of a run.

    What makes them imports torch: seconds, and hundreds of megabytes. So it is there when the first job needs it, and
    not when the server starts.

    Attributes:
        versions: which models are available, and what they consist of.
        downloads: opens downloads of the available versions.
    """

    def __init__(self, blobs: Blobs, executor: Executor, config: ServerConfig, run_id: str) -> None:
        self.versions = ModelVersions(blobs)
        self.downloads = Downloads(blobs, run_id, self.versions)
        self._given = (blobs, executor, config, run_id, self.versions)
        self._maker: ModelMaker | None = None
        self._one_at_a_time = threading.Lock()

    def load(self) -> "ModelMaker":
        """Return the maker of the first and the next model.

        The first call may take seconds: not for the event loop.

        Raises:
            SeamError: if something that is trusted cannot be imported.
        """
        from fedring.server.model.making import ModelMaker

        with self._one_at_a_time:
            if self._maker is None:
                self._maker = ModelMaker(*self._given)
            return self._maker

    @property
    def maker(self) -> "ModelMaker":
        """The result of load(), for a job that runs."""
        return self._maker or self.load()
