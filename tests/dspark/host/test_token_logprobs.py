"""Log probabilities of chosen tokens, where only some requests of a batch ask for them."""

import torch
from sglang.srt.layers.logprob_processor import LogprobStage, get_token_ids_logprobs_raw

from dspark.host import sampling_hooks


def test_a_row_without_tokens_is_an_empty_tensor(monkeypatch):
    monkeypatch.setattr(sampling_hooks, "is_ours", lambda: True)
    table = torch.arange(12.0).reshape(3, 4)
    values, tokens = sampling_hooks.empty_rows_as_tensors(
        get_token_ids_logprobs_raw,
        table,
        [[1, 3], None, [0]],
        LogprobStage.DECODE,
        no_copy_to_cpu=True,
    )
    assert [row.tolist() for row in values] == [[1.0, 3.0], [], [8.0]]
    assert tokens == [[1, 3], [], [0]]
