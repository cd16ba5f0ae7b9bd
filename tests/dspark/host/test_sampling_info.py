"""What SGLang's batch says about sampling reaches every row."""

from types import SimpleNamespace

import torch

from dspark.host.sampling_info import adjust

VOCAB = 16


def test_bias_and_mask_are_added_to_every_row():
    bias = torch.zeros(2, VOCAB)
    bias[1, 3] = 5.0

    class Mask:
        def apply(self, logits):
            assert logits.shape == (2 * 3, VOCAB)
            logits[0, :] = -torch.inf  # row 0 of request 0 only

    logits = torch.zeros(2, 3, VOCAB)
    adjust(logits, SimpleNamespace(logit_bias=bias, has_custom_logit_processor=False), Mask())
    assert (logits[0, 0] == -torch.inf).all()
    assert (logits[0, 1:] == 0).all()
    assert (logits[1, :, 3] == 5).all()
