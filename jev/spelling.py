"""Which name was meant by one that is nearly right. For fields of a request, variables, flags and commands."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 64        # characters of a name that are looked at
SHORT = 5           # letters of a name in which one slip is allowed; in a longer one two are


def letters(name: str) -> str:
    """A name without what people write differently: case, hyphens, underscores and the like."""
    return "".join(filter(str.isalnum, name)).casefold()


def meant(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` is most like, or None when it is like none of them.

    A slip is a letter too many, too few, a wrong one, or two that changed places; a short name may have one, others two.
    """
    written, best, fewest = letters(name[:LONGEST]), None, 3
    for candidate in known:
        right = letters(candidate)
        allowed = 1 if len(right) <= SHORT else 2
        if abs(len(written) - len(right)) <= allowed and (slips := distance(written, right)) <= min(allowed, fewest - 1):
            best, fewest = candidate, slips
    return best


def distance(a: str, b: str) -> int:
    """The slips that make `a` of `b` (the optimal string alignment distance). Takes len(a) x len(b) steps."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        above, row = row, [i + 1]
        for j, y in enumerate(b):
            least = min(above[j] + (x != y), above[j + 1] + 1, row[j] + 1)
            if i and j and x == b[j - 1] and y == a[i - 1]:
                least = min(least, before[j - 1] + 1)
            row.append(least)
        before = above
    return row[-1]
