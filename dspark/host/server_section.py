"""What every DeepSeek-V4 server adds to the `dspark` section of `/server_info`."""

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
