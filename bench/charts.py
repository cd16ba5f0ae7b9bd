"""Charts of the raw records, as SVG. Needs matplotlib (`pip install sglang-dspark[bench]`).

Each file names the hash of the record it was drawn from, so that a test can tell when a chart is
older than its data without drawing it again.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dspark.bench.medians import median_levels

Record = Mapping[str, Any]
INK, GREY = "#1f5fa8", "#9a9a9a"


def data_hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def throughput(record: Record, axes: Any) -> None:
    """Decode-window throughput of both arms over clients, against linear scaling."""
    for (name, arm), colour in zip(record["arms"].items(), (GREY, INK), strict=True):
        levels = [level for level in median_levels(record, name) if level["decode_window"]]
        clients = [level["concurrency"] for level in levels]
        axes.plot(clients, [level["decode_window"] for level in levels], "o-", color=colour,
                  label=arm["label"])  # fmt: skip
        if clients and clients[0] == 1:
            single = levels[0]["decode_window"]
            axes.plot(clients, [c * single for c in clients], ":", color=colour, linewidth=1)
        axes.set_xticks(clients)
    axes.set_xlabel("clients (dotted: linear in the first)")
    axes.set_ylabel("tokens/s while all decode")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{record['model']}, {record['prompts']['set']} prompts")
    axes.legend()


def acceptance(record: Record, axes: Any) -> None:
    """Share of verify steps that accepted at least k drafts, in the widest level."""
    level = median_levels(record, "B")[-1]
    shares = level["acceptance_by_position"]
    positions = range(1, len(shares) + 1)
    axes.bar(positions, [100 * share for share in shares], color=INK)
    axes.set_xticks(list(positions))
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted, % of verify steps")
    axes.set_ylim(0, 100)
    length = level["accepted_length"]
    axes.set_title(f"{length:.2f} tokens per verify step" if length else "no verify step")


def stock_ratio(record: Record, axes: Any) -> None:
    """How many times our time the stock op takes."""
    both = [f for f in record["figures"] if f["us"] and f["stock_us"]][::-1]
    names = [f"{f['op']}, {f['case']}" for f in both]
    axes.barh(names, [f["stock_us"] / f["us"] for f in both], color=INK)
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("time of the stock op / time of ours")
    gpus = record["environment"]["gpus"]
    axes.set_title(gpus[0]["name"] if gpus else "")
    axes.tick_params(axis="y", labelsize=7)


def reliability(record: Record, axes: Any) -> None:
    """Predicted against observed chance that drafts 1..k are all accepted, every k pooled."""
    figure = record["figures"]["typed code, T=0"]
    for name, label, colour in (
        ("reliability", "as trained", GREY),
        ("reliability_calibrated", "calibrated", INK),
    ):
        predicted, observed, _ = zip(*figure[name], strict=True)
        axes.plot(predicted, observed, "o-", color=colour, label=label, markersize=4)
    axes.plot([0, 1], [0, 1], ":", color=GREY, linewidth=1)
    axes.set_xlabel("predicted chance of acceptance")
    axes.set_ylabel("observed")
    axes.set_title(f"typed code, T=0, {figure['blocks']} blocks")
    axes.legend()


def acceptance_by_text(record: Record, axes: Any) -> None:
    """Acceptance of draft k where all before it were accepted."""
    for index, (name, figure) in enumerate(record["figures"].items()):
        shares = figure["conditional"]
        style = "osDv"[index // 2] + ("-" if name.endswith("T=0") else "--")
        colour = INK if "code" in name else GREY
        label = f"{name} ({figure['accepted_length']:.2f} tokens per step)"
        axes.plot(range(1, len(shares) + 1), shares, style, color=colour, label=label)
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted, given all before")
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, len(shares) + 1))
    axes.legend(fontsize=7)


# chart -> (record, drawing, size in inches)
CHARTS: dict[str, tuple[str, Callable[[Record, Any], None], tuple[float, float]]] = {
    "throughput-cpu.svg": ("pair-cpu.json", throughput, (5, 3.2)),
    "acceptance-cpu.svg": ("pair-cpu.json", acceptance, (5, 3.2)),
    "throughput-h200.svg": ("pair-h200.json", throughput, (5, 3.2)),
    "acceptance-h200.svg": ("pair-h200.json", acceptance, (5, 3.2)),
    "embedded-reliability.svg": ("embedded-acceptance.json", reliability, (5, 3.2)),
    "embedded-acceptance.svg": ("embedded-acceptance.json", acceptance_by_text, (5, 3.2)),
    "stock-ops-h200.svg": ("stock-ops-h200.json", stock_ratio, (7, 5.5)),
}


def draw_all(results: Path, folder: Path) -> list[Path]:
    """Draw every chart whose record exists."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "dspark"  # the same data gives the same file
    folder.mkdir(exist_ok=True)
    drawn = []
    for name, (file, draw, size) in CHARTS.items():
        source = results / file
        if not source.exists():
            continue
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        axes.spines[["top", "right"]].set_visible(False)
        draw(json.loads(source.read_text()), axes)
        metadata = {"Date": None, "Description": f"data sha256 {data_hash(source)}"}
        figure.savefig(folder / name, metadata=metadata)
        pyplot.close(figure)
        drawn.append(folder / name)
    return drawn
