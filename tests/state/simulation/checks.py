"""Violations carry the name of the property they break; counters prove that it was looked at."""

from collections import Counter


class Violation(AssertionError):
    def __init__(self, prop: str, message: str):
        super().__init__(f"{prop}: {message}")
        self.prop = prop


class Checks:
    """ignored: properties that may be violated, to see what else notices a mutation."""

    def __init__(self, ignored: frozenset[str] = frozenset()):
        self.made: Counter[str] = Counter()
        self.ignored = ignored

    def require(self, prop: str, holds, message: str) -> None:
        self.made[prop] += 1
        if not holds and prop not in self.ignored:
            raise Violation(prop, message)
