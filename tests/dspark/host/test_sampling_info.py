"""What SGLang's batch says about sampling reaches every row."""

from types import SimpleNamespace

import torch

from dspark.host.sampling_info import adjust, store_logprobs_of

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


def test_log_probabilities_of_a_request_do_not_depend_on_its_neighbours():
    generator = torch.Generator().manual_seed(0)
    logits = 9 * torch.randn(3 * 2, VOCAB, generator=generator)
    tokens = torch.randint(VOCAB, (3, 2), generator=generator)
    temperatures = torch.tensor([[1.0], [0.7], [1.0]])  # greedy, sampled, greedy

    def ask(requests: list[int]) -> torch.Tensor:
        out, info = SimpleNamespace(), SimpleNamespace(temperatures=temperatures[requests])
        rows = logits.view(3, 2, VOCAB)[requests].flatten(0, 1)
        nothing = [0] * len(requests), [None] * len(requests)
        store_logprobs_of(out, rows, tokens[requests], info, *nothing)
        return out.next_token_logprobs

    together = ask([0, 1, 2])
    assert all(ask([i]).equal(together[[i]]) for i in range(3))
    exact = (logits[2:4].double() / temperatures[1].double()).log_softmax(-1)
    assert torch.allclose(together[1].double(), exact.gather(1, tokens[1][:, None])[:, 0])
