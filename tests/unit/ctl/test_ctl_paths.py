"""What flctl's verbs check before they begin: folders, files, and options that do not belong together."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedring.control.failure import Failure
from fedring.ctl.local.presets import Dataset, check_data_root
from fedring.daemon.exits import Exit

Call = Callable[..., tuple[int, str, str]]

FOLDERS = ["try", "profile --dataset digits"]
FILES = ["models export 0", "pipeline draw 1f1b"]
NEEDING_DATA = ["try {}", "profile --dataset {}"]


@pytest.fixture(autouse=True)
def _nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLCTL_SERVER", "127.0.0.1:1")


@pytest.mark.parametrize("verb", FOLDERS)
def test_an_out_that_cannot_be_a_folder_is_refused_before_anything_starts(
    flctl: Call, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        code, stdout, err = flctl(*verb.split(), "--out", out)
        assert (code, stdout, err.count("\n")) == (Exit.USAGE, "", 1)
        assert err.startswith(f"flctl: --out {out} cannot be a folder: ")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("verb", FILES)
def test_an_out_that_cannot_be_a_file_is_refused_before_anything_is_asked(
    flctl: Call, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    for out, sentence in (
        (Path(), "--out . is a folder: name a file in it"),
        (tmp_path, f"--out {tmp_path} is a folder: name a file in it"),
        (tmp_path / "nope" / "m", f"there is no folder {tmp_path / 'nope'}: make it, or name another file"),
        (tmp_path / "file" / "m", f"there is no folder {tmp_path / 'file'}: make it, or name another file"),
    ):
        code, stdout, err = flctl(*verb.split(), "--out", out)
        assert (code, stdout, err.count("\n")) == (Exit.USAGE, "", 1)
        assert sentence in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("verb", [*FOLDERS, *FILES])
def test_an_out_where_no_file_can_be_made_is_refused(flctl: Call, verb: str) -> None:
    out = Path("/proc/file" if verb in FILES else "/proc")  # where not even root can make files
    code, _, err = flctl(*verb.split(), "--out", out)
    assert (code, err.count("\n")) == (Exit.USAGE, 1)
    assert err.startswith(f"flctl: --out {out}: no file can be made in the folder /proc: ")


def test_a_file_that_cannot_be_written_later_is_one_sentence(flctl: Call, tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()  # in the place of the file that flctl try writes
    code, out, err = flctl("try", "--out", tmp_path)
    assert (code, out, err.count("\n")) == (Exit.FAILED, "", 1)
    assert err.startswith(f"flctl: {tmp_path / 'report.json'}: ")


@pytest.mark.parametrize(
    ("dataset", "place"),
    [
        (Dataset.MNIST, "MNIST/raw"),
        (Dataset.FASHION_MNIST, "FashionMNIST/raw"),
        (Dataset.CIFAR10, "cifar-10-batches-py"),
    ],
)
def test_a_folder_without_the_data_set_is_refused_with_the_command_that_downloads_it(
    tmp_path: Path, dataset: Dataset, place: str
) -> None:
    with pytest.raises(Failure) as refused:
        check_data_root(dataset, tmp_path)
    assert refused.value.exit_code == Exit.CONFIG
    assert f"it belongs in {tmp_path / place};" in str(refused.value)
    command = f"from fedring.data import {dataset}; {dataset}({str(tmp_path)!r}, download=True)"
    assert str(refused.value).endswith(f'python -c "{command}"')
    assert not any(tmp_path.iterdir())


def test_a_damaged_data_set_is_refused(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (raw / f"{part}-{kind}-ubyte").write_bytes(b"no numbers at all")
    with pytest.raises(Failure, match="There is no complete MNIST"):
        check_data_root(Dataset.MNIST, tmp_path)


@pytest.mark.parametrize("verb", NEEDING_DATA)
def test_every_verb_checks_its_data_before_it_starts_anything(flctl: Call, tmp_path: Path, verb: str) -> None:
    (tmp_path / "empty").mkdir()
    given = ("--data-root", tmp_path / "empty", "--out", tmp_path / "out")
    code, stdout, err = flctl(*verb.format("mnist").split(), *given)
    assert (code, stdout, err.count("\n")) == (Exit.CONFIG, "", 1)
    assert "There is no complete MNIST" in err
    assert not (tmp_path / "out").exists()
    code, _, err = flctl(*verb.format("digits").split(), "--data-root", tmp_path / "none", "--out", tmp_path)
    assert (code, err) == (Exit.CONFIG, f"flctl: --data-root {tmp_path / 'none'} is not a folder\n")
