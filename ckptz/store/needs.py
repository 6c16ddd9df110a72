"""What may be deleted: the one rule of all that deletes files which others may be stored against.

A file may go when nothing that stays needs it. What cannot be read, whatever the reason, may need anything
older than itself: all of that stays as it is, and the caller is told why. What could be read in a minute
must not be lost because of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    """A file, a folder or a step."""

    @property
    def name(self) -> str:
        """The file's name in messages."""

    def __hash__(self) -> int: ...


T = TypeVar("T", bound=Named)


@dataclass(frozen=True, slots=True)
class Needs(Generic[T]):
    """The files that those which stay are decoded from."""

    known: frozenset[T]  # what they are stored against, through whole chains
    doubtful: frozenset[T]  # what those that cannot be read may be stored against
    notes: tuple[str, ...]  # which those are, and why


def needs_of(
    kept: Iterable[T], bases_of: Callable[[T], Iterable[T]], may_need: Callable[[T], Collection[T]]
) -> Needs[T]:
    """Find the files that must not be deleted beside `kept`.

    Args:
        kept: what stays.
        bases_of: what one is stored against; raises whatever it likes if that cannot be found out.
        may_need: all that one may be stored against, itself unread.
    """
    known: set[T] = set()
    doubtful: set[T] = set()
    notes = []
    waiting = list(dict.fromkeys(kept))
    while waiting:
        one = waiting.pop()
        try:
            new = [base for base in bases_of(one) if base not in known]
        except Exception as error:  # stores behind URLs have errors of their own
            doubtful.update(may_need(one))
            notes.append(f"{one.name} cannot be read, so all that is older stays until it can: {error}")
            continue
        known.update(new)
        waiting.extend(new)
    return Needs(frozenset(known), frozenset(doubtful), tuple(sorted(notes)))
