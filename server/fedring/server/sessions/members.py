"""The clients that are here, cheap to change.

A client that comes or goes changes the state of each open round. A copy of a dictionary takes as long as there are
clients, so that ten thousand of them that come back at once would take minutes. Here the clients lie in many small
dictionaries, by the hash of their names, and a change copies one of them.
"""

from collections.abc import ItemsView, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

_BUCKETS = 256

T = TypeVar("T")


class Members(Mapping[str, T], Generic[T]):
    """An immutable mapping of clients' names."""

    __slots__ = ("_buckets", "_count")

    def __init__(self, members: Iterable[tuple[str, T]] = ()) -> None:
        buckets: list[dict[str, T]] = [{} for _ in range(_BUCKETS)]
        for name, member in members:
            buckets[hash(name) % _BUCKETS][name] = member
        self._buckets = tuple(buckets)
        self._count = sum(map(len, buckets))

    def having(self, name: str, member: T) -> "Members[T]":
        """Return a copy in which the client is this."""
        place = hash(name) % _BUCKETS
        return self._with(place, {**self._buckets[place], name: member})

    def without(self, name: str) -> "Members[T]":
        """Return a copy without the client."""
        place = hash(name) % _BUCKETS
        return self._with(place, {other: member for other, member in self._buckets[place].items() if other != name})

    def __getitem__(self, name: str) -> T:
        return self._buckets[hash(name) % _BUCKETS][name]

    def __iter__(self) -> Iterator[str]:
        for bucket in self._buckets:
            yield from bucket

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"Members({dict(self)})"

    def items(self) -> ItemsView[str, T]:
        """Return the names with their clients."""
        return _Items(self)

    def _with(self, place: int, bucket: dict[str, T]) -> "Members[T]":
        copy: Members[T] = object.__new__(Members)
        copy._buckets = (*self._buckets[:place], bucket, *self._buckets[place + 1 :])
        copy._count = self._count + len(bucket) - len(self._buckets[place])
        return copy


class _Items(ItemsView[str, T]):
    def __init__(self, members: Members[T]) -> None:
        super().__init__(members)
        self._members = members

    def __iter__(self) -> Iterator[tuple[str, T]]:
        for bucket in self._members._buckets:
            yield from bucket.items()
