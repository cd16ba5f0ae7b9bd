"""The few figures that README leads with, each with the machine it was measured on."""

from collections.abc import Callable, Mapping
from typing import Any

from dspark.bench.table import counted

Record = Mapping[str, Any]


def speed_up(record: Record) -> str:
    """Both arms of a pair, end to end; no ratio where their outputs differ."""
    if record["speed_up"] is None:
        return "none: the outputs differ"
    ratios = [
        f"{of['end_to_end']['geomean']:.2f}x with {counted(int(clients), 'client')}"
        for clients, of in record["speed_up"].items()
    ]
    return ", ".join(ratios)


def exactness(record: Record) -> str:
    verdict = (
        "identical" if record["identical"] else counted(len(record["differences"]), "difference")
    )
    return f"{record['tokens_compared']:,} tokens over {record['starts']} cold starts: {verdict}"


def small_card(record: Record) -> str:
    """The server with DSpark and no other flag, on what a 24 GB card has free."""
    case = record["cases"]["default-dspark"]
    planned = case["memory"]["planned"]
    return (
        f"{case['memory']['requests']} requests at once, pool of {planned['tokens']:,} tokens; "
        f"{case['requests']} requests sent, {len(case['failures'])} failed"
    )


def promises(record: Record) -> str:
    kept = sum(figure["holds"] for figure in record["figures"])
    return f"{kept} of {len(record['figures'])} cases keep every promise"


# what it says, raw record, how it is shown
LINES: tuple[tuple[str, str, Callable[[Record], str]], ...] = (
    ("DSpark over target-only, embedded checkpoint, end to end", "pair-cpu.json", speed_up),
    ("Same greedy tokens with and without DSpark", "exact-cpu.json", exactness),
    (
        "One rank of Flash with DSpark, card made to look like 24 GB",
        "memory-24gb-h200.json",
        small_card,
    ),
    ("Every op with sm_89 code generation", "proof-ops-h200-sm89.json", promises),
)
