"""`dspark plan`: what a server would hold on given cards, without loading or downloading anything.

Memory is divided by the code that a starting server uses (`dspark/host/memory_budget.py`). Before
the start less is known than a worker measures, so the plan leaves room for what CUDA may take,
and says so where a card has less. Step times are projections and say so.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from dspark.commands import projection
from dspark.commands.cards import CARDS, CardModel
from dspark.errors import UsageError
from dspark.host import capabilities, memory_budget, memory_flags
from dspark.host.memory_budget import GIB, MIB, Budget, BudgetError, Card, Load, Wishes
from dspark.target.caches import PAGE_TOKENS
from dspark.target.checkpoint import presets
from dspark.target.config import ConfigError, ModelConfig
from dspark.target.sharding import check_tp

MODELS = {"flash": presets.flash} | presets.PRESETS
UNSEEN = memory_budget.CONTEXT_MOST + memory_budget.FRAGMENTS  # bytes; not in the table
TIGHT = "  That is tight: the server may find that its worker has less, and refuse to start."
DRAFTING = "--speculative-algorithm dspark"


class Memory(NamedTuple):
    """What one of the cards would hold."""

    load: Load
    budget: Budget
    free: int  # bytes of the card before the start
    more: list[str]  # changes of flags that would enlarge the pool

    @property
    def spare(self) -> int:
        """Bytes beside the budget: what CUDA and torch take, and what nothing needs."""
        return self.free - self.budget.total


class Projected(NamedTuple):
    """Steps of so many requests, without drafts and, where the model has them, with."""

    requests: int
    plain: projection.Step
    drafting: projection.Step | None


def read_model(said: str) -> ModelConfig:
    """The configuration of a directory, a config.json or a preset.

    Raises:
        UsageError: there is none, or it is of a model that is not served.
    """
    path = Path(said)
    try:
        if path.is_dir():
            return ModelConfig.from_checkpoint(path)
        if path.is_file():
            return ModelConfig.from_hf(json.loads(path.read_text()))
        if said in MODELS:
            return ModelConfig.from_hf(MODELS[said]())
    except ConfigError as error:
        raise UsageError(str(error)) from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}.") from None
    raise UsageError(
        f"{said} is neither a checkpoint directory, nor a config.json, nor one of "
        f"{', '.join(MODELS)}."
    )


def plan_memory(config: ModelConfig, cards: int, free: int, wishes: Wishes, drafts: bool) -> Memory:
    """Divide `free` bytes of each card as a server would that is given `wishes`.

    Raises:
        UsageError: the cards cannot share the model, or what was asked for does not fit.
    """
    block = config.dspark.block_size if config.dspark and drafts else 0
    load = Load(
        config,
        cards,
        verify_width=1 + block,
        requests=1,
        context=1,
        prompt_rows=1,
        window_ratio=memory_flags.WINDOW_RATIO,
        graphs=True,
    )
    card = Card(free)
    try:
        check_tp(config, cards)
        weights = memory_budget.checkpoint_weights(config, cards, load.stages > 0)
        load, tokens = memory_budget.plan(card, weights, load, wishes)
    except (BudgetError, ConfigError) as error:
        raise UsageError(str(error)) from None
    pages = tokens // PAGE_TOKENS
    if wishes.tokens is None:
        pages = min(pages, memory_budget.useful_pages(load))
    more = memory_budget.what_gives_more(load, weights, card.cautious.available, None)
    return Memory(load, memory_budget.budget(load, weights, pages), free, more)


def typical_tokens(memory: Memory) -> int:
    """Tokens of a request in the projection, when as many run as the plan admits."""
    share = memory.budget.tokens // memory.load.requests
    return min(memory.load.context, share, projection.TYPICAL_TOKENS)


def project(memory: Memory, bandwidth: float) -> list[Projected]:
    """Steps of one request and of as many as the plan admits."""
    load, tokens = memory.load, typical_tokens(memory)
    plain = load._replace(verify_width=1)
    return [
        Projected(
            requests,
            projection.step(plain, bandwidth, requests, tokens),
            projection.step(load, bandwidth, requests, tokens) if load.stages else None,
        )
        for requests in sorted({1, load.requests})
    ]


def command_line(model: str, load: Load) -> str:
    """What starts the planned server; a preset has no directory to name."""
    path = model if Path(model).is_dir() else "DIR"
    words = [
        f"dspark serve --model-path {path}",
        f"--tp-size {load.tp}",
        *([DRAFTING] if load.stages else []),
        f"--max-running-requests {load.requests}",
        f"--context-length {load.context}",
        f"--chunked-prefill-size {load.prompt_rows}",
    ]
    return " ".join(words)


def as_text(model: str, memory: Memory, steps: list[Projected], lines: list[str]) -> str:
    """The plan for a terminal; `lines` are the assumptions of the projected steps."""
    load, budget = memory.load, memory.budget
    each = min(load.context, budget.tokens // load.requests)
    text = [
        memory_budget.table(budget, load, memory.more),
        f"  Of {memory.free / GIB:.2f} GiB free before the start {memory.spare / MIB:,.0f} MiB are "
        f"left, of which CUDA and torch's allocator take up to {UNSEEN / MIB:,.0f} MiB.",
        *([TIGHT] if memory.spare < UNSEEN else []),
        "",
        f"Fits on {load.tp} card{'s' if load.tp > 1 else ''}: {load.requests} requests at once, "
        f"each of up to {each:,} tokens when all are equally long; one alone of up to "
        f"{load.context:,}.",
        "",
        command_line(model, load),
    ]
    if steps:
        text += ["", "Projection of a decode step, not a measurement:"]
        text += [step_line(one) for one in steps]
        text += ["It assumes that", *(f"  - {line}" for line in lines)]
    return "\n".join(text)


def step_line(one: Projected) -> str:
    def parts(step: projection.Step) -> str:
        return (
            f"{1000 * step.seconds:.1f} ms (weights and cache {step.read / 1e9:.2f} GB "
            f"{1000 * step.reading:.1f}, launches {1000 * step.launching:.1f}, "
            f"sums {1000 * step.summing:.1f})"
        )

    line = f"  {one.requests} request{'s' if one.requests > 1 else ''}: target {parts(one.plain)}"
    if one.drafting is None:
        return line
    needed = one.drafting.seconds / one.plain.seconds
    return (
        f"{line}\n    DSpark {parts(one.drafting)}; it pays above {needed:.2f} tokens a step "
        "and request"
    )


def as_json(model: str, memory: Memory, steps: list[Projected], lines: list[str]) -> dict[str, Any]:
    """The plan for programs: bytes of one card, seconds of a step."""
    load, budget = memory.load, memory.budget

    def figures(step: projection.Step | None) -> dict[str, float] | None:
        return None if step is None else step._asdict() | {"seconds": step.seconds}

    return {
        "fits": True,
        "model": model,
        "cards": load.tp,
        "free": memory.free,
        "planned": budget._asdict() | {"total": budget.total},
        "requests": load.requests,
        "context": load.context,
        "prompt_rows": load.prompt_rows,
        "verify_width": load.verify_width,
        "gives_more": memory.more,
        "command": command_line(model, load),
        "projection": [
            {
                "requests": one.requests,
                "target": figures(one.plain),
                "dspark": figures(one.drafting),
            }
            for one in steps
        ],
        "assumptions": lines,
    }


def at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def gibibytes(text: str) -> float:
    value = float(text)
    if not 0 < value < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text} must be GiB of one card")
    return value


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dspark plan",
        description="What a server would hold on given cards: nothing is loaded or downloaded.",
    )
    parser.add_argument("model", help=f"checkpoint directory, config.json or {', '.join(MODELS)}")
    parser.add_argument("--cards", type=at_least_one, default=1, help="how many (ranks)")
    parser.add_argument("--card", choices=CARDS, help="memory and bandwidth of a known card")
    parser.add_argument(
        "--memory", type=gibibytes, metavar="GIB", help="free on each card before the start"
    )
    parser.add_argument(
        "--context", type=at_least_one, dest="context_length", help="tokens of the longest request"
    )
    parser.add_argument("--requests", type=at_least_one, help="at once")
    parser.add_argument(
        "--draft",
        action=argparse.BooleanOptionalAction,
        help="speculate with DSpark (default: where the checkpoint has a draft)",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.memory is None and options.card is None:
        parser.error("give --card NAME or --memory GIB")
    return options


def warn(card: CardModel | None) -> None:
    if card and (said := capabilities.sentence(card.capability)):
        print(f"dspark: {said}.", file=sys.stderr)


def main(argv: list[str]) -> int:
    options = arguments_of(argv)
    card = CARDS.get(options.card)
    free = int((options.memory or card.free) * GIB)  # type: ignore[union-attr]  # one is given
    try:
        config = read_model(options.model)
        memory_flags.refuse_long_context(options, config)
        if options.draft and config.dspark is None:
            raise UsageError("--draft: the checkpoint holds no DSpark draft (--no-draft).")
        drafts = config.dspark is not None if options.draft is None else options.draft
        wishes = Wishes(requests=options.requests, context=options.context_length)
        memory = plan_memory(config, options.cards, free, wishes, drafts)
    except UsageError as error:
        if not options.json:
            raise
        print(json.dumps({"fits": False, "reason": str(error).removeprefix("dspark: ")}))
        return 1
    warn(card)
    steps: list[Projected] = []
    lines: list[str] = []
    if card:
        bandwidth = 1e9 * card.bandwidth
        steps = project(memory, bandwidth)
        lines = projection.assumptions(memory.load, bandwidth, typical_tokens(memory))
    if options.json:
        print(json.dumps(as_json(options.model, memory, steps, lines), indent=1))
    else:
        print(as_text(options.model, memory, steps, lines))
    return 0
