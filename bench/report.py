"""Write every figure of README.md and docs/ from the raw records in bench/results.

    python -m dspark.bench.report            # tables between markers, and the charts
    python -m dspark.bench.report --check    # exit status 1 when a page disagrees with the records

A table stands between `<!-- bench:NAME -->` and `<!-- /bench -->`; NAME is one of `TABLES`,
`options` for that of the flags, or `summary` for the one of `dspark.bench.summary`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dspark import options
from dspark.bench import summary
from dspark.bench.medians import median_levels
from dspark.bench.table import accuracy, counted, number
from dspark.bench.throughput import THROUGHPUTS

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path("bench/results")
PAGES = ("README.md", "README.zh.md", "docs/results.md", "docs/flags.md")
MARKED = re.compile(r"(<!-- bench:(?P<name>[\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
Record = Mapping[str, Any]


class ReportError(ValueError):
    """A page asks for something that the records do not give; one sentence."""


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table whose first column is text and whose others are figures."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(environment: Record, single: bool = False) -> str:
    """Where it ran, in words. single: on one card, whatever the machine has."""
    gpus = [gpu["name"] for gpu in environment["gpus"]]
    if gpus:
        count = f"one of {len(gpus)}" if single and len(gpus) > 1 else str(len(gpus))
        return f"{count} x {gpus[0]}, driver {environment['gpus'][0]['driver_version']}"
    cpu = environment["cpu"]
    return f"{cpu['cores']} cores of {cpu['model']}, no GPU, load average {cpu['load']:.1f}"


def caption(record: Record, single: bool = False) -> str:
    environment = record["environment"]
    packages = ", ".join(
        f"{name} {environment['packages'][name]}"
        for name in ("torch", "triton", "sglang")
        if name in environment["packages"]
    )
    parts = [f"Machine: {machine(environment, single)}", packages, environment["date"][:10]]
    if environment["source"]["commit"]:
        parts.append(f"commit {environment['source']['commit'][:10]}")
    return "; ".join(parts) + "."


def inputs(record: Record) -> str:
    prompts = record["prompts"]
    kind = "synthetic random ids" if prompts["synthetic"] else f"{prompts['set']} prompts"
    return (
        f"Model {record['model']}; {kind}, {prompts['input_tokens']} input and "
        f"{record['output_tokens']} output tokens, greedy, prompt hash `{prompts['sha256'][:16]}`. "
    )


def figures_row(label: str, level: Record) -> list[str]:
    return [
        label,
        str(level["concurrency"]),
        *(number(level[name]) for name in THROUGHPUTS),
        number(level["accepted_length"], 2),
        number(level["step_time"], 1, 1e3),
        number(level["ttft"].get("p50"), 0, 1e3),
        number(level["itl"].get("p50"), 1, 1e3),
        number(level["itl"].get("p99"), 1, 1e3),
    ]


FIGURES = [
    "arm", "clients", "scheduler output tok/s", "decode window tok/s", "end to end tok/s",
    "tokens per verify step", "step ms", "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms",
]  # fmt: skip


def serving_table(record: Record) -> str:
    """Figures of both arms of a pair, medians over its rounds."""
    rows = [
        figures_row(arm["label"], level)
        for name, arm in record["arms"].items()
        for level in median_levels(record, name)
    ]
    medians = f"Medians of {len(record['rounds'])} rounds."
    return f"{inputs(record)}{caption(record)} {medians}\n\n{markdown(FIGURES, rows)}"


def with_share(value: float | None, share: float | None) -> str:
    return number(value) if share is None else f"{number(value)} ({number(share, 0, 100)} %)"


def scaling_table(record: Record) -> str:
    """One server over numbers of clients, each throughput also as a share of C times that of C1."""
    rows = [
        [
            str(level["concurrency"]),
            *(with_share(level[name], level["of_linear"][name]) for name in THROUGHPUTS),
            number(level["accepted_length"], 2),
            number(level["step_time"], 1, 1e3),
        ]
        for level in record["levels"]
    ]
    header = [
        "clients", "scheduler output tok/s (of linear)", "decode window tok/s (of linear)",
        "end to end tok/s (of linear)", "tokens per verify step", "step ms",
    ]  # fmt: skip
    return f"{inputs(record)}{caption(record)}\n\n{markdown(header, rows)}"


def speed_up_table(record: Record) -> str:
    """Ratios with their intervals; a pair whose outputs differ has none."""
    labels = [arm["label"] for arm in record["arms"].values()]
    if record["speed_up"] is None:
        return f"No speed-up: the outputs of {labels[1]} and {labels[0]} differ."
    same = "identical outputs" if record["outputs_identical"] else "outputs not compared"
    rows = [
        [
            f"{counted(int(clients), 'client')}, {statistic.replace('_', ' ')}",
            f"{ratio['geomean']:.2f}x",
            f"{ratio['low']:.2f} to {ratio['high']:.2f}",
            str(ratio["pairs"]),
        ]
        for clients, by_statistic in record["speed_up"].items()
        for statistic, ratio in by_statistic.items()
    ]
    header = [f"{labels[1]} over {labels[0]}, {same}", "ratio", "95 % interval", "pairs"]
    return markdown(header, rows)


def exact_table(record: Record) -> str:
    verdict = "identical" if record["identical"] else f"{len(record['differences'])} differences"
    rows = [
        ["cold starts of each mode", str(record["starts"])],
        ["runs compared (starts x orders)", str(len(record["runs"]))],
        ["tokens compared", str(record["tokens_compared"])],
        ["distinct tokens among them", str(record["distinct_tokens"])],
        ["result", f"**{verdict}**"],
    ]
    return f"{inputs(record)}{caption(record)}\n\n{markdown(['token-exact check', ''], rows)}"


def stock_table(record: Record) -> str:
    """Both times, and the rate at which ours moves the bytes it must."""
    rows = []
    for figure in record["figures"]:
        ours, stock, moved = figure["us"], figure["stock_us"], figure["bytes"]
        rows.append(
            [
                f"{figure['op']}, {figure['case']}",
                number(ours),
                number(stock),
                f"{stock / ours:.1f}x" if ours and stock else "-",
                number(moved / ours / 1e3, 0) if ours and moved else "-",
            ]
        )
    header = ["op", "ours us", "stock us", "stock / ours", "ours GB/s"]
    code = "sm_89 code generation on this card" if record["sm89"] else "native code generation"
    where = f"{caption(record, single=True)} Medians inside CUDA graphs, {code}."
    return f"{where}\n\n{markdown(header, rows)}"


def proof_table(record: Record) -> str:
    """One line an op: the worst accuracy over its sizes, its promises, its time at each size."""
    by_op: dict[tuple[str, str], list[Record]] = {}
    for figure in record["figures"]:
        by_op.setdefault((figure["op"], figure["inputs"]), []).append(figure)

    def promise(figures: list[Record], name: str) -> str:
        kept = {figure[name] for figure in figures}
        return "**no**" if False in kept else "yes" if True in kept else "-"

    def over_sizes(figures: list[Record], name: str, digits: int, factor: float = 1.0) -> str:
        return " / ".join(number(figure[name], digits, factor) for figure in figures)

    rows = []
    for (op, given), figures in by_op.items():
        sizes = ", ".join(str(figure["size"]) for figure in figures)
        problems = "".join(f"; **{f['problem']}**" for f in figures if f["problem"])
        right = all(figure["right"] for figure in figures)
        rows.append(
            [
                f"`{op}`, {given}; {sizes} {figures[0]['unit']}s{problems}",
                accuracy(figures) if right else f"**{accuracy(figures)}**",
                promise(figures, "deterministic"),
                promise(figures, "invariant"),
                over_sizes(figures, "us", 1),
                over_sizes(figures, "gb_per_s", 0),
                over_sizes(figures, "share_of_copy_bandwidth", 0, 100),
            ]
        )
    header = [
        "op, inputs and sizes", "largest error, integers and codes",
        f"{record['runs']} calls equal", "row alone equal", "us", "GB/s", "% of copy bandwidth",
    ]  # fmt: skip
    kept = sum(figure["holds"] for figure in record["figures"])
    code = "sm_89 code generation on this card" if record["sm89"] else "native code generation"
    where = (
        f"{caption(record, single=True)} Medians inside CUDA graphs, {code}; copy bandwidth "
        f"{number(record['copy_bandwidth'], 2, 1e-12)} TB/s. "
        f"Every promise holds in {kept} of {len(record['figures'])} cases."
    )
    return f"{where}\n\n{markdown(header, rows)}"


def step_table(record: Record) -> str:
    """Kernels timed alone and added up, by part of the model."""
    step = record["step"]
    parts: dict[str, float] = {}
    for op in step["ops"]:
        parts[op["part"]] = parts.get(op["part"], 0.0) + op["step_us"]
    parts["**all**"] = step["total_us"]
    rows = [[part, number(us, 2, 1e-3)] for part, us in parts.items()]
    header = [f"ops of one step of one of eight ranks, {counted(step['rows'], 'row')}", "ms"]
    return markdown(header, rows)


def decode_step_table(record: Record) -> str:
    """Whole layers in one graph, and the 43 layers of Flash added up from them."""
    rows = []
    for step in record["steps"]:
        layers = [step["layer"][f"ratio {ratio}"] for ratio in (0, 4, 128)]
        whole = step["flash_43_layers_and_head"]
        rows.append(
            [
                f"{counted(step['rows'], 'row')}, context {step['context']}",
                *(number(layer["microseconds"], 0) for layer in layers),
                number(whole["microseconds"], 2, 1e-3),
                str(whole["triton_launches"]),
            ]
        )
    header = [
        "one step of one of eight ranks, no collectives", "window layer us", "C4 layer us",
        "C128 layer us", "43 layers and head ms", "Triton launches",
    ]  # fmt: skip
    return f"{caption(record, single=True)}\n\n{markdown(header, rows)}"


def tuner_table(record: Record) -> str:
    """Verdict and the best candidates by lower bound."""
    timed = [c for c in record["candidates"] if c["geomean"] is not None]
    ranked = sorted(timed, key=lambda c: (c["id"] != "control", -c["ci95_low"]))[:6]
    rows = [
        [
            f"`{c['id']}`",
            f"{c['geomean']:.3f}",
            f"{c['ci95_low']:.3f}",
            f"{c['worst']['speedup']:.3f} ({c['worst']['case']})",
            "yes" if c["pass"] else "no",
        ]
        for c in ranked
    ]
    header = ["candidate", "geometric mean", "95 % bound", "worst case", "passes"]
    env = record["env"]
    result = f"`{record['winner']}`" if record["winner"] else "the incumbent stays"
    return (
        f"`{record['op']}` on {env['gpu']}, torch {env['torch']}, triton {env['triton']}; "
        f"incumbent `{record['incumbent']['id']}`, {len(record['candidates']) - 1} candidates: "
        f"**{record['status']}**, {result}.\n\n{markdown(header, rows)}"
    )


def embedded_table(record: Record) -> str:
    """Acceptance and calibration of the shipped checkpoint by kind of text and temperature."""
    rows = [
        [
            name,
            str(figure["blocks"]),
            f"{figure['accepted_length']:.2f}",
            " ".join(number(share, 2) for share in figure["conditional"]),
            *(
                f"{sum(figure[errors]) / len(figure[errors]):.3f} / {max(figure[errors]):.3f}"
                for errors in ("ece", "ece_calibrated", "ece_by_chance")
            ),
        ]
        for name, figure in record["figures"].items()
    ]
    header = [
        "text", "verified blocks", "tokens per verify step", "acceptance of draft k, given k - 1",
        "ECE mean / worst", "calibrated", "by chance",
    ]  # fmt: skip
    prompts = ", ".join(f"{count} {kind}" for kind, count in record["prompts"].items())
    what = f"{prompts} prompts, {record['tokens_per_prompt']} new tokens each, as served"
    return f"{what}. {caption(record)}\n\n{markdown(header, rows)}"


# marker -> (raw record, how it is shown)
def rank_sum_table(record: Record) -> str:
    """One sum over eight ranks, of which one runs the kernel and seven publish."""
    rows = [
        [
            counted(figure["rows"], "row"),
            number(figure["received"], 0, 1 / 1024),
            *(number(figure[name], 1) for name in ("early_us", "late_us", "copies_us")),
        ]
        for figure in record["figures"]
    ]
    header = ["one sum over eight ranks", "KB read", "others early us", "others late us",
              "copies and sum us"]  # fmt: skip
    return f"{caption(record, single=True)}\n\n{markdown(header, rows)}"


def small_card_table(record: Record) -> str:
    """Servers on what a card of 24 GB has free."""
    rows = [
        [
            name,
            f"{case['memory']['planned']['tokens']:,}",
            number(case["startup_s"], 0),
            str(case["requests"]),
            str(len(case["failures"])),
            str(case["retractions"]),
            str(len(case["kernels_compiled"])),
            f"{case['plan_over_measured']:+.1%}",
            same_ids(record, name),
        ]
        for name, case in record["cases"].items()
    ]
    header = [
        "flags", "tokens in the pool", "start s", "requests", "failed", "retracted",
        "kernels compiled when ready", "plan over measured", "greedy outputs as alone",
    ]  # fmt: skip
    return f"{caption(record, single=True)}\n\n{markdown(header, rows)}"


def same_ids(record: Record, name: str) -> str:
    """Of a case that was compared with the target alone."""
    found = record["comparisons"].get(f"{name} against default-target")
    return f"{found['equal']} of {found['compared']}" if found else "-"


TABLES: dict[str, tuple[str, Callable[[Record], str]]] = {
    "serving-cpu": ("pair-cpu.json", serving_table),
    "scaling-cpu": ("serve-cpu.json", scaling_table),
    "speed-up-cpu": ("pair-cpu.json", speed_up_table),
    "serving-h200": ("pair-h200.json", serving_table),
    "speed-up-h200": ("pair-h200.json", speed_up_table),
    "exact-cpu": ("exact-cpu.json", exact_table),
    "exact-h200": ("exact-h200.json", exact_table),
    "stock-ops-h200": ("stock-ops-h200.json", stock_table),
    "proof-ops-h200": ("proof-ops-h200.json", proof_table),
    "proof-ops-h200-sm89": ("proof-ops-h200-sm89.json", proof_table),
    "decode-step-h200": ("decode-step-h200.json", decode_step_table),
    "step-h200": ("stock-ops-h200.json", step_table),
    "embedded-acceptance": ("embedded-acceptance.json", embedded_table),
    "rank-sum-h200": ("rank-sum-h200.json", rank_sum_table),
    "memory-24gb-h200": ("memory-24gb-h200.json", small_card_table),
    "tune-schedule-h200": ("h200-tune-schedule/session.json", tuner_table),
}


def render(name: str, results: Path) -> str:
    """ReportError for an unknown name or a record that is not there."""
    if name == "options":
        return options.markdown()
    if name == "summary":
        return summary_table(results)
    if name not in TABLES:
        raise ReportError(f"a page asks for bench:{name}; known are {', '.join(TABLES)}.")
    file, show = TABLES[name]
    return show(read_record(name, results, file))


def read_record(name: str, results: Path, file: str) -> Record:
    """ReportError where the record that table `name` needs is not there."""
    path = results / file
    if not path.exists():
        raise ReportError(f"bench:{name} needs {RESULTS / file}, which is not there.")
    return json.loads(path.read_text())


def summary_table(results: Path) -> str:
    """One line a record, with its machine and day."""
    rows = []
    for what, file, show in summary.LINES:
        record = read_record("summary", results, file)
        environment = record["environment"]
        where = f"{machine(environment, single=True)}, {environment['date'][:10]}"
        rows.append([what, show(record), where])
    lines = [["what", "result", "machine"], ["---"] * 3, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def regenerate(page: str, results: Path) -> str:
    """The page's text with every marked table written anew."""

    def replace(match: re.Match[str]) -> str:
        return f"{match[1]}{render(match['name'], results)}\n{match[3]}"

    return MARKED.sub(replace, page)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dspark.bench.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    arguments = parser.parse_args(argv)
    texts = {name: (REPOSITORY / name).read_text() for name in PAGES}
    try:
        fresh = {name: regenerate(text, REPOSITORY / RESULTS) for name, text in texts.items()}
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    stale = [name for name in PAGES if fresh[name] != texts[name]]
    if arguments.check:
        for name in stale:
            print(f"{name} does not show what bench/results says.", file=sys.stderr)
        return int(bool(stale))
    for name in stale:
        (REPOSITORY / name).write_text(fresh[name])
    from dspark.bench.charts import draw_all

    for chart in draw_all(REPOSITORY / RESULTS, REPOSITORY / "bench/charts"):
        print(f"Wrote {chart.relative_to(REPOSITORY)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
