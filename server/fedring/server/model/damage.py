"""What is said of a published model, or of accepted updates, of which a file turned out to be damaged."""

from collections.abc import Iterable

from fedring.server.state.blobs import StorageError
from fedring.server.state.checked import DamagedBlob
from fedring.server.state.rows import ModelRow, UpdateRow


class DamagedModel(DamagedBlob):
    """A file of a published model is damaged; `version` is the model's."""

    def __init__(self, row: ModelRow, error: DamagedBlob, way: str) -> None:
        text = f"model {row.version} is damaged: blobs/{error.digest} {error.what}: {way}"
        super().__init__(error.digest, error.what, text)
        self.version = row.version


class DamagedUpdates(StorageError):
    """Accepted updates are damaged; `clients` says whose, with one sentence on each."""

    def __init__(self, damaged: Iterable[tuple[UpdateRow, str]]) -> None:
        self.clients: dict[str, str] = {}
        for row, what in damaged:
            place = f"blobs/{row.blob}" if row.blob else "in facts.sqlite"
            self.clients[row.client_id] = f"the accepted update of {row.client_id} ({place}) {what}"
        super().__init__("damaged_blob", "; ".join(self.clients.values()))
