"""The notebook of the tutorials runs from its first cell to its last."""

from pathlib import Path

import pytest

from tests.conftest import ROOT

NOTEBOOK = ROOT / "docs" / "five-minutes.ipynb"


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client")
def test_the_notebook_runs_and_prints_what_the_site_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", ":".join(str(ROOT / part) for part in ("server", "client", "common", "protos")))
    kept = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    for cell in run.cells:
        if cell.cell_type == "code":
            cell.outputs = []
        # Fewer rounds than a reader gets, so that the suite stays short.
        cell.source = cell.source.replace('"rounds": 20', '"rounds": 3')
    assert '"rounds": 3' in "".join(cell.source for cell in run.cells)
    nbclient.NotebookClient(run, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [kinds(cell) for cell in run.cells] == [kinds(cell) for cell in kept.cells]
    assert (tmp_path / "even" / "model.safetensors").is_file()
    assert not any("Traceback" in str(cell) or str(ROOT) in str(cell) for cell in kept.cells)


def kinds(cell: dict[str, object]) -> list[object]:
    """Return the kinds of a cell's outputs; texts in pieces count once."""
    outputs = cell.get("outputs") or []
    assert isinstance(outputs, list)
    return list(dict.fromkeys((output["output_type"], output.get("name")) for output in outputs))
