"""What every DeepSeek-V4 server adds to the `dspark` section of `/server_info`."""

from collections.abc import Sequence
from typing import Any

from dspark.host import memory_report, rank_sums, tuned
from dspark.kernels.common.dispatch import use_triton


def of_target(runner) -> dict[str, Any]:
    """runner: SGLang's ModelRunner of the target."""
    return {
        "memory": memory_report.section(runner.model.memory_report),
        "routes": routes(runner.model),
    }


def routes(model) -> dict[str, Any]:
    """Which implementation each choice made at load came down to."""
    on_triton = use_triton(model.weights.embed)
    return {
        "kernels": "triton" if on_triton else "torch reference",
        "experts": "this package's MXFP4 kernel" if on_triton else "dequantised MXFP4",
        "rank_sums": rank_sums.transport(model.group),
        "tuned": [str(file) for file in tuned.files()] if on_triton else [],
    }


def running(reqs: Sequence[Any]) -> list[dict[str, Any]]:
    """Requests that decode, each with tokens of its prompt and its output so far.

    `delivered` and `rows` are sums over its verify `steps`: tokens it took, target rows run for
    it. All three are 0 without speculation.

    Args:
        reqs: SGLang's `Req`s.
    """
    return [
        {
            "rid": req.rid,
            "prompt": len(req.origin_input_ids),
            "written": len(req.output_ids),
            "steps": req.spec_verify_ct,
            "delivered": req.spec_verify_ct + req.spec_num_correct_drafts,
            "rows": req.spec_num_cap_tokens,
        }
        for req in reqs
        if not req.finished()
    ]
