"""What was measured, on what, and how."""

from dspark.bench.page.parts import Facts, Record
from dspark.bench.table import counted


def inputs(record: Record) -> Facts:
    prompts = record["prompts"]
    kind = "synthetic random ids" if prompts["synthetic"] else prompts["set"]
    temperature = record.get("temperature", 0)
    return [
        ("model", str(record["model"])),
        ("prompts", f"{prompts['prompts']} of kind {kind}, {prompts['input_tokens']} tokens each"),
        ("prompt hash", prompts["sha256"]),
        ("output", f"{record['output_tokens']} tokens each, temperature {temperature:g}"),
    ]


def environment(of: Record) -> Facts:
    source = of["source"]
    changed = {True: ", with changes", False: "", None: ""}[source["dirty"]]
    cpu = of["cpu"]
    cards = [
        f"{card['name']}, driver {card['driver_version']}, {card['clocks.sm']} of "
        f"{card['clocks.max.sm']} MHz, limit {card['power.limit']} W"
        for card in of["gpus"]
    ]
    return [
        ("date", of["date"]),
        ("command", of["command"]),
        ("commit", f"{source['commit'] or 'unknown'}{changed}"),
        ("GPU", "; ".join(cards) or "none"),
        ("CPU", f"{counted(cpu['cores'], 'core')} of {cpu['model']}, load {cpu['load']:.2f}"),
        ("Python", of["python"]),
        ("packages", ", ".join(f"{name} {version}" for name, version in of["packages"].items())),
    ]
