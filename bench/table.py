"""Plain text tables."""

from collections.abc import Mapping, Sequence
from typing import Any


def number(value: float | None, digits: int = 1, factor: float = 1.0) -> str:
    """A figure, or "-" when it could not be measured."""
    return "-" if value is None else f"{value * factor:.{digits}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, two spaces apart."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    ]
    return "\n".join(lines)


def counted(count: int, noun: str) -> str:
    """As in "1 row" and "2 rows"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def accuracy(figures: Sequence[Mapping[str, Any]]) -> str:
    """Of one op of `proof_ops` at some sizes, as in "2.1e-03, equal" or "3 of 512 differ"."""
    errors = [figure["error"] for figure in figures if figure["error"] is not None]
    compared = sum(figure["compared"] or 0 for figure in figures)
    differing = sum(figure["differing"] or 0 for figure in figures)
    parts = [f"{max(errors):.1e}"] if errors else []
    if compared:
        parts.append(f"{differing} of {compared} differ" if differing else "equal")
    return ", ".join(parts) or "-"
