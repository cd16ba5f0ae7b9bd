"""Counters of drafts for `/metrics`, beside SGLang's own; `--enable-metrics` switches on both."""

from collections.abc import Sequence
from typing import Any


class DraftCounters:
    """Counted by the first rank; SGLang's server gathers the counters of its processes.

    Args:
        depth: drafts of a verify step.
        model: the name that SGLang's figures carry as `model_name`.
        registry: of prometheus_client; its own by default.
    """

    def __init__(self, depth: int, model: str, registry: Any = None):
        # Not at the top: at import it decides whether several processes count together.
        from prometheus_client import REGISTRY, Counter

        registry = registry or REGISTRY
        self.steps = Counter(
            "dspark:verify_steps_total",
            "Verify steps, one a request.",
            labelnames=("model_name",),
            registry=registry,
        ).labels(model)
        self.rows = Counter(
            "dspark:verify_rows_total",
            "Rows of the target that verify steps ran.",
            labelnames=("model_name",),
            registry=registry,
        ).labels(model)
        accepted = Counter(
            "dspark:drafts_accepted_total",
            "Verify steps that accepted the draft at this position and all before it.",
            labelnames=("model_name", "position"),
            registry=registry,
        )
        self.accepted = [accepted.labels(model, str(k)) for k in range(1, depth + 1)]

    def record(self, accepted: Sequence[int], rows: Sequence[int]) -> None:
        """One step: drafts delivered and target rows run, of each request."""
        self.steps.inc(len(accepted))
        self.rows.inc(sum(rows))
        for k, counter in enumerate(self.accepted):
            counter.inc(sum(count > k for count in accepted))


def counters_of(server_args: Any, rank: int, depth: int) -> DraftCounters | None:
    """None where nobody asked for metrics, and on all ranks but the first."""
    if not server_args.enable_metrics or rank != 0:
        return None
    return DraftCounters(depth, server_args.served_model_name)
