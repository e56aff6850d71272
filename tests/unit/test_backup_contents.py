"""A backup has each blob that the database names."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tests.unit.rows import a_model

from fedring.server.state.backup.contents import read_contents
from fedring.server.state.rows import ModelRow
from fedring.server.state.store import SqlStore


def test_a_backup_has_all_blobs_of_a_model(tmp_path: Path) -> None:
    columns = [field.name for field in fields(ModelRow) if field.name.endswith("blob")]
    names: dict[str, Any] = {column: f"{number:064x}" for number, column in enumerate(columns, start=1)}
    store = SqlStore(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    store.publish(replace(a_model(1), **names))
    assert store.named_blobs() == set(names.values())
    store.close()
    assert {blob.digest for blob in read_contents(tmp_path / "facts.sqlite").blobs} == set(names.values())
