"""Wrong shares are found among right ones, as long as there are enough of these."""

import random
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from fedring.secure.shamir import PRIME, SHARE_BYTES, BadShares, combine, correct, split

EDGES = (0, 1, PRIME - 1, PRIME, 2 ** (8 * SHARE_BYTES) - 1)


def share_of(value: int) -> bytes:
    return value.to_bytes(SHARE_BYTES, "little")


@given(st.integers(1, 9), st.integers(0, 4), st.integers(0, 1), st.randoms(use_true_random=False))
def test_half_of_the_spare_shares_may_be_wrong(needed: int, wrong: int, odd: int, rng: random.Random) -> None:
    secret = rng.randbytes(32)
    count = needed + 2 * wrong + odd
    shares = dict(enumerate(split(secret, needed, count), 1))
    for place in rng.sample(sorted(shares), wrong):
        shares[place] = share_of(rng.choice([*EDGES, rng.randrange(PRIME)]))
    assert correct(shares, needed) == secret


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 8), st.randoms(use_true_random=False))
def test_no_secret_is_found_that_too_few_shares_belong_to(
    needed: int, spare: int, wrong: int, rng: random.Random
) -> None:
    shares = dict(enumerate(split(rng.randbytes(32), needed, needed + spare), 1))
    for place in rng.sample(sorted(shares), min(wrong, len(shares))):
        shares[place] = share_of(rng.choice([*EDGES, rng.randrange(PRIME)]))
    found = correct(shares, needed)
    usable = [place for place, share in shares.items() if int.from_bytes(share, "little") < PRIME]
    fitting = -(-(needed + len(usable)) // 2)  # so many shares must belong to it
    subsets = combinations(usable, fitting)
    assert found is None or any(_combined({place: shares[place] for place in each}) == found for each in subsets)


def test_a_secret_and_shares_of_zero_are_a_polynomial_too() -> None:
    assert correct({place: bytes(SHARE_BYTES) for place in range(1, 6)}, 3) == bytes(32)
    assert correct({1: share_of(7), 2: bytes(SHARE_BYTES), 3: bytes(SHARE_BYTES)}, 1) == bytes(32)


def test_what_is_no_secret_of_32_bytes_is_not_found() -> None:
    assert correct({place: share_of(2**256) for place in range(1, 6)}, 3) is None


def test_fewer_shares_than_the_threshold_give_nothing() -> None:
    assert correct({}, 1) is None
    assert correct({1: share_of(PRIME), 2: share_of(PRIME + 1), 3: share_of(1)}, 2) is None


def _combined(shares: dict[int, bytes]) -> bytes | None:
    try:
        return combine(shares)
    except BadShares:
        return None
