"""What a case of `dspark.bench.memory_card` held of its card."""

from dspark.bench.page.charts import bars
from dspark.bench.page.parts import Record, Section, Table, share
from dspark.bench.table import counted

GIB = 1 << 30


def memory_case(name: str, case: Record) -> Section:
    memory = case["memory"]
    planned, measured = memory["planned"], memory["measured"]
    parts = {part: held for part, held in planned.items() if part not in ("tokens", "total")}
    facts = [
        ("flags", " ".join(case["flags"]) or "none"),
        ("requests sent", f"{case['requests']:,}, {len(case['failures']):,} failed"),
        ("pool", f"{planned['tokens']:,} tokens"),
        ("requests at once", f"{memory['requests']:,}"),
        ("context", f"{memory['context']:,} tokens"),
        ("planned", f"{gib(planned['total'])} GiB"),
        ("most allocated at start", f"{gib(measured['most_allocated'])} GiB"),
        ("start", f"{case['startup_s']:.1f} s"),
    ]
    rows = [[part, gib(held), share(held / planned["total"])] for part, held in parts.items()]
    return Section(
        name,
        facts=facts,
        bars=[
            bars(
                "Planned GiB by part",
                list(parts),
                {"planned": [held / GIB for held in parts.values()]},
                "GiB",
            )
        ],
        tables=[Table("What is planned", ["part", "GiB", "share"], rows)],
    )


def compared_cases(comparisons: Record) -> str:
    """Greedy outputs of cases against those of others."""
    told = [
        f"{name}: {found['equal']} of {counted(found['compared'], 'output')} equal"
        for name, found in comparisons.items()
    ]
    return "; ".join(told) or "not compared with another case"


def gib(held: float) -> str:
    return f"{held / GIB:.2f}"
