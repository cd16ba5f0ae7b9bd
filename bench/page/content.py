"""What a page says, by the kind of its record."""

from dspark.bench.medians import median_levels
from dspark.bench.page.acceptance import acceptance
from dspark.bench.page.facts import environment, inputs
from dspark.bench.page.memory import compared_cases, memory_case
from dspark.bench.page.parts import Page, Record, Section, Table, Verdict
from dspark.bench.page.speed import MEANING, fastest, figures, linear, ratio, rounds, throughput
from dspark.bench.page.tokens import difference_table, same_tokens, tokens_verdict
from dspark.bench.table import counted


def page(record: Record) -> Page:
    """KeyError or IndexError where the record lacks something; ValueError for another kind."""
    kind = "memory" if "cases" in record else record.get("kind")
    if kind not in PAGES:
        raise ValueError(f"records of kind {kind!r} have no page; {', '.join(PAGES)} have one.")
    return PAGES[kind](record)


def serve(record: Record) -> Page:
    levels = record["levels"]
    verdict = Verdict(
        "open", "NOT COMPARED", "One server was measured. dspark bench exact compares tokens."
    )
    settings = [(name.replace("_", " "), str(value)) for name, value in record["server"].items()]
    return Page(
        f"Throughput of {record['model']}",
        verdict,
        [*inputs(record), *environment(record["environment"])],
        [
            Section(
                "Throughput",
                MEANING,
                bars=[throughput("", levels, fastest([levels]))],
                tables=[figures("", levels), linear(levels)],
            ),
            acceptance({"": levels}),
            Section("Server", facts=settings),
        ],
    )


def pair(record: Record) -> Page:
    arms = labels(record)
    levels = {label: median_levels(record, name) for name, label in arms.items()}
    flags = [
        (f"flags of {label}", " ".join(record["arms"][name]["flags"] or []) or "none")
        for name, label in arms.items()
    ]
    top = fastest(levels.values())
    note = f"{MEANING} Figures are medians of {counted(len(record['rounds']), 'round')}."
    return Page(
        f"{arms['B']} over {arms['A']}",
        same_tokens(record),
        [*inputs(record), *flags, *environment(record["environment"])],
        [
            ratio(record, arms),
            Section(
                "Throughput",
                note,
                bars=[throughput(label, of_arm, top) for label, of_arm in levels.items()],
                tables=[figures(label, of_arm) for label, of_arm in levels.items()],
            ),
            acceptance(levels),
            Section("Rounds", tables=[rounds(record, arms)]),
        ],
    )


def labels(record: Record) -> dict[str, str]:
    """Of the arms; told apart where somebody compares a server with itself."""
    given = {name: arm["label"] for name, arm in record["arms"].items()}
    if len(set(given.values())) == len(given):
        return given
    return {name: f"{label} ({name})" for name, label in given.items()}


def exact(record: Record) -> Page:
    runs = counted(len(record["runs"]), "run")
    verdict = tokens_verdict(record["differences"], record["tokens_compared"], f"of {runs}")
    flags = [(f"flags of {mode}", given or "none") for mode, given in record["modes"].items()]
    compared = [
        ("cold starts of each", str(record["starts"])),
        ("distinct tokens", f"{record['distinct_tokens']:,}"),
    ]
    sections = [Section("Runs", tables=[Table("", ["run"], [[run] for run in record["runs"]])])]
    if record["differences"]:
        sections.insert(0, Section("First differences", tables=[difference_table(record)]))
    return Page(
        f"Tokens of {' and '.join(record['modes'])}",
        verdict,
        [*inputs(record), *flags, *compared, *environment(record["environment"])],
        sections,
    )


def memory(record: Record) -> Page:
    cases = record["cases"]
    failures = sum(len(case["failures"]) for case in cases.values())
    sent = sum(case["requests"] for case in cases.values())
    differing = any(found["differing"] for found in record["comparisons"].values())
    verdict = Verdict(
        "bad" if failures or differing else "good",
        "DIFFERENT TOKENS" if differing else f"{failures:,} OF {sent:,} REQUESTS FAILED",
        f"In {counted(len(cases), 'case')}. Tokens: {compared_cases(record['comparisons'])}.",
    )
    return Page(
        "What a server holds of a card",
        verdict,
        environment(record["environment"]),
        [memory_case(name, case) for name, case in cases.items()],
    )


PAGES = {"serve": serve, "pair": pair, "exact": exact, "memory": memory}
