"""Draw the token of a position: top-k, top-p and min-p, then one noise for all who ask.

Rows come in a fixed stride: rows `r * V .. r * V + V - 1` are the laws of V consecutive positions
of request r (V = 1 without drafts). Everything else is given once a request.

The noise of a token is named by (seed, position, token) alone. Who draws, and in which batch, does
not enter: the target without drafts, the target over a verify block and the draft all add the same
numbers. A draft is right when it equals the token the target draws at its position, so drafts
change how many tokens a step emits, never which.
"""

from torch import Tensor

from dspark.kernels.common.dispatch import op
from dspark.kernels.sampling import reference
from dspark.kernels.sampling.types import Cut

__all__ = ["Cut", "choose", "cut_tails"]


def _rows_fit(logits: Tensor, temperature: Tensor) -> None:
    requests = temperature.shape[0]
    rows = logits.shape[0]
    if logits.dim() != 2 or (rows % requests if requests else rows):
        raise ValueError(
            f"{requests} requests need logits [{requests} * V, vocab], got {list(logits.shape)}"
        )


cut_tails = op(reference.cut_tails, check=_rows_fit)
choose = op(reference.choose, check=_rows_fit)
