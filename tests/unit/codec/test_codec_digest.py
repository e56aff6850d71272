"""Names of bytes: BLAKE3 for new names, SHA-256 for old ones."""

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from fedring.codec import Vectors
from fedring.codec.digest import Digest, is_called, is_name, name_of, update_name

# The test vectors that BLAKE3 and FIPS 180-2 publish.
NOTHING = "blake3-af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
ABC = "blake3-6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
OLD_NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
OLD_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_name_says_which_algorithm_it_is_of() -> None:
    assert (name_of(b"abc"), name_of()) == (ABC, NOTHING)
    assert Digest().name == NOTHING


@pytest.mark.parametrize(
    "parts", [[b"abc"], [b"a", b"bc"], [b"", b"ab", b"", b"c"], [bytearray(b"a"), memoryview(b"bc")]]
)
def test_the_name_does_not_depend_on_how_bytes_are_divided(parts: list[bytes]) -> None:
    assert name_of(*parts) == ABC
    for like, name in ((ABC, ABC), (OLD_ABC, OLD_ABC), (NOTHING, ABC), (OLD_NOTHING, OLD_ABC)):
        digest = Digest(like)
        for part in parts:
            digest.update(part)
        assert digest.name == digest.name == name


def test_sha256_names_are_still_recognised() -> None:
    assert is_called(b"abc", OLD_ABC)
    assert is_called(b"", OLD_NOTHING)
    assert not is_called(b"abd", OLD_ABC)
    assert Digest(OLD_ABC).name == hashlib.sha256().hexdigest()


def test_a_name_fits_its_own_bytes_only() -> None:
    assert is_called(b"abc", ABC)
    assert is_called(memoryview(b"abc"), ABC)
    assert not is_called(b"abd", ABC)
    assert not is_called(b"abc", ABC.removeprefix("blake3-")), "that would be SHA-256"
    assert not is_called(b"abc", f"blake3-{OLD_ABC}")
    for wrong in ("", "abc", ABC.upper(), ABC[:-1], f"sha256-{OLD_ABC}"):
        assert not is_called(b"abc", wrong)


@pytest.mark.parametrize("name", [ABC, NOTHING, OLD_ABC, OLD_NOTHING, "0" * 64, "blake3-" + "f" * 64])
def test_these_texts_are_names(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize(
    "text",
    [
        *("", "..", "state_id", "blake3-", "g" * 64, "/" * 64, "blake3-" + "٣" * 64),
        *(ABC[:-1], ABC + "0", ABC + "\n", " " + ABC, ABC.upper(), "BLAKE3-" + ABC[7:], "blake3-" + ABC),
        *(OLD_ABC[:-1], OLD_ABC + "0", OLD_ABC + "\n", OLD_ABC.upper(), "sha256-" + OLD_ABC),
    ],
)
def test_these_texts_are_not_names(text: str) -> None:
    assert not is_name(text)


def test_the_name_of_an_array_does_not_depend_on_its_shape() -> None:
    values = np.arange(12, dtype="<f4")
    wanted = name_of(values.tobytes())
    assert (
        name_of(values.data)
        == name_of(values.reshape(3, 4).data)
        == name_of(values[:5].data, values[5:].data)
        == wanted
    )


@pytest.mark.parametrize("like", [ABC, OLD_ABC])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_an_array_without_values_adds_nothing(shape: tuple[int, ...], like: str) -> None:
    digest = Digest(like)
    before = digest.name
    digest.update(np.empty(shape, np.float64).data)
    digest.update(b"")
    assert digest.name == before


@pytest.mark.parametrize("like", [ABC, OLD_ABC])
@pytest.mark.parametrize("values", [np.arange(12.0)[::2], np.arange(12.0).reshape(3, 4).T], ids=["strided", "turned"])
def test_arrays_that_are_not_contiguous_are_refused(values: NDArray[np.float64], like: str) -> None:
    digest = Digest(like)
    before = digest.name
    with pytest.raises(TypeError, match="contiguous"):
        digest.update(values.data)
    assert digest.name == before


def test_the_name_of_a_model_does_not_depend_on_its_memory_layout() -> None:
    parameters, buffers = np.arange(6, dtype=np.float32), np.arange(3.0)
    wanted = name_of(parameters.astype("<f4").tobytes() + buffers.astype("<f8").tobytes())
    strided = Vectors(np.repeat(parameters, 2)[::2], np.repeat(buffers, 2)[::2])
    swapped = Vectors(parameters.astype(">f4"), buffers.astype(">f8"))
    for vectors in (Vectors(parameters, buffers), strided, swapped):
        assert vectors.digest() == wanted
    old = hashlib.sha256(parameters.tobytes() + buffers.tobytes()).hexdigest()
    assert strided.digest(like=old) == old
    assert Vectors(np.empty(0, np.float32), np.empty(0)).digest() == NOTHING


def test_an_update_is_named_by_its_header_and_the_name_of_its_payload() -> None:
    header = b"\x0a\x05run-1\x10\x07\x1a\x05alice"
    # Computed with only the package `blake3`, from the header's bytes followed by the characters of the payload's name.
    wanted = "blake3-432157178669008dca95a36a920a812c0f663497fce14f41975b3a5256fcc506"
    assert update_name(header, ABC) == wanted
    assert update_name(header, OLD_ABC) == "blake3-053c1b21fe54d1d1afdbc23f3dfaf7031be882238de483361b88e713c7acd36e"
    assert (
        len({wanted, update_name(header + b"\x10\x08", ABC), update_name(header, NOTHING), update_name(b"", ABC)}) == 4
    )
