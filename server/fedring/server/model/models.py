"""One object for models: their versions, their making, their downloads.

The other rooms use it for all that they do with models.
"""

from concurrent.futures import Executor

from fedring.server.aggregation.versions import ModelVersions
from fedring.server.config import ServerConfig
from fedring.server.model.downloads import Downloads
from fedring.server.model.making import ModelMaker
from fedring.server.state.blob_interfaces import Blobs


class Models:
    """The models of a run.

    Attributes:
        versions: which models are available, and what they consist of.
        maker: makes the first and the next model.
        downloads: opens downloads of the available versions.
    """

    def __init__(self, blobs: Blobs, executor: Executor, config: ServerConfig, run_id: str) -> None:
        self.versions = ModelVersions(blobs)
        self.maker = ModelMaker(blobs, executor, config, run_id, self.versions)
        self.downloads = Downloads(blobs, run_id, self.versions)
