"""How many drafts were accepted, by position."""

from collections.abc import Mapping

from dspark.bench.page.charts import Bars, bars
from dspark.bench.page.parts import Levels, Section, Table, share, titled
from dspark.bench.table import counted


def acceptance(arms: Mapping[str, Levels]) -> Section:
    """arms: label -> levels; those that verified nothing are left out."""
    title = "Acceptance by position"
    drafting = {
        arm: [level for level in levels if level["acceptance_by_position"]]
        for arm, levels in arms.items()
    }
    shown = {arm: levels for arm, levels in drafting.items() if levels}
    if not shown:
        return Section(title, "No draft was verified.")
    return Section(
        title,
        "The share of verify steps that accepted this draft and all before it.",
        bars=[acceptance_chart(arm, levels) for arm, levels in shown.items()],
        tables=[acceptance_table(arm, levels) for arm, levels in shown.items()],
    )


def draft_names(levels: Levels) -> list[str]:
    depth = max(len(level["acceptance_by_position"]) for level in levels)
    return [f"draft {k}" for k in range(1, depth + 1)]


def acceptance_chart(arm: str, levels: Levels) -> Bars | None:
    percent = {
        counted(level["concurrency"], "client"): [
            100 * part for part in level["acceptance_by_position"]
        ]
        for level in levels
    }
    title = titled("Accepted, % of verify steps", arm)
    return bars(title, draft_names(levels), percent, "%", highest=100.0)


def acceptance_table(arm: str, levels: Levels) -> Table:
    rows = [
        [str(level["concurrency"]), *map(share, level["acceptance_by_position"])]
        for level in levels
    ]
    return Table(arm, ["clients", *draft_names(levels)], rows)
