"""Frequency, presence and repetition penalties and min_new_tokens, exact inside a verify block.

Row j of a verify block is conditioned on drafts 1..j, so each row has penalties of its own. What
a request has emitted is kept on the device by request slot: the host learns of tokens one step
late. Penalties count output tokens only, as SGLang's do, and are added up in the same order, so
that a verify row gives the bits of the decode step it stands for.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dspark.state.upload import Upload

UPLOAD_BYTES = 1 << 16  # at a time: settings of all requests of a prompt batch, or 8,192 tokens
NEUTRAL = (0.0, 0.0, 1.0, 0)  # frequency, presence, repetition, min_new_tokens


def settings(params: Any) -> tuple[float, float, float, int]:
    """(frequency, presence, repetition, min_new_tokens) of SGLang's SamplingParams."""
    return (
        params.frequency_penalty,
        params.presence_penalty,
        params.repetition_penalty,
        params.min_new_tokens,
    )


def is_penalised(params: Any) -> bool:
    return settings(params) != NEUTRAL


def any_penalised(reqs: Sequence[Any]) -> bool:
    return any(is_penalised(req.sampling_params) for req in reqs)


def stop_ids(req: Any) -> set[int]:
    """Tokens that min_new_tokens holds back: all that would end the request.

    SGLang itself leaves out those of the checkpoint's configuration (`host.target_penalties`).
    There is a tokenizer: SGLang refuses min_new_tokens (status 400) on a server without one.
    """
    found = set(req.sampling_params.stop_token_ids or ())
    found |= set(req.eos_token_ids or ())
    found |= set(getattr(req.tokenizer, "additional_stop_token_ids", None) or ())
    if req.tokenizer.eos_token_id is not None:
        found.add(req.tokenizer.eos_token_id)
    return found


class Penalties:
    """Penalty state of all request slots. S slots (0 is padding), N tokens in the vocabulary."""

    def __init__(self, slots: int, vocab: int, device: torch.device | str):
        self._upload = Upload(UPLOAD_BYTES, torch.device(device))
        self.frequency_sum = torch.zeros(slots, vocab, device=device)  # added up token by token
        self.seen = torch.zeros(slots, vocab, dtype=torch.bool, device=device)
        self.held_back = torch.zeros(slots, vocab, dtype=torch.bool, device=device)  # stop tokens
        self.frequency = torch.zeros(slots, device=device)
        self.presence = torch.zeros(slots, device=device)
        self.repetition = torch.ones(slots, device=device)
        self.min_new = torch.zeros(slots, dtype=torch.int64, device=device)
        self.prompt_len = torch.zeros(slots, dtype=torch.int64, device=device)

    def admit(self, slot: torch.Tensor, reqs: Sequence[Any]) -> None:
        """Start over for requests whose prompt is being run; a retracted one keeps its output.

        slot: i64 [R] on the device.
        """
        self.frequency_sum[slot] = 0.0
        self.seen[slot] = False
        self.held_back[slot] = False
        columns = [(*settings(req.sampling_params), len(req.origin_input_ids)) for req in reqs]
        on_device = self._upload(torch.tensor(columns, dtype=torch.float64))
        self.frequency[slot] = on_device[:, 0].float()
        self.presence[slot] = on_device[:, 1].float()
        self.repetition[slot] = on_device[:, 2].float()
        self.min_new[slot] = on_device[:, 3].long()
        self.prompt_len[slot] = on_device[:, 4].long()
        for i, req in enumerate(reqs):
            own = slot[i : i + 1]
            if req.sampling_params.min_new_tokens:
                for tokens in self._uploaded(sorted(stop_ids(req))):
                    self.held_back[own, tokens] = True
            if len(req.output_ids) and is_penalised(req.sampling_params):
                for tokens in self._uploaded(list(req.output_ids)):
                    self.commit(own, tokens[None], torch.full_like(own, len(tokens)))

    def _uploaded(self, tokens: list[int]) -> Iterator[torch.Tensor]:
        """i64 on the device, in parts that the upload holds."""
        for part in torch.tensor(tokens, dtype=torch.int64).split(UPLOAD_BYTES // 8):
            yield self._upload(part)

    def commit(self, slot: torch.Tensor, tokens: torch.Tensor, count: torch.Tensor) -> None:
        """Count emitted tokens. slot: i64 [R]. tokens: i64 [R, V], the first count[r] are real."""
        for j in range(tokens.shape[1]):
            real = j < count
            step = torch.where(real, self.frequency[slot], 0.0)
            self.frequency_sum.index_put_((slot, tokens[:, j]), step, accumulate=True)
            self.seen[slot, tokens[:, j]] |= real

    def apply(
        self,
        logits: torch.Tensor,
        slot: torch.Tensor,
        drafts: torch.Tensor,
        position: torch.Tensor,
    ) -> None:
        """Penalise the rows of each request in place.

        Args:
            logits: f32 [R, V, N]; row j follows the emitted tokens and drafts 0..j-1.
            slot: i64 [R] request slots.
            drafts: i64 [R, V - 1]; a prompt's last row has none.
            position: i64 [R] of each request's last emitted token.
        """
        total, seen = self.frequency_sum[slot], self.seen[slot]  # copies
        each = self.frequency[slot][:, None]
        presence, repetition = self.presence[slot][:, None], self.repetition[slot][:, None]
        emitted = position + 1 - self.prompt_len[slot]  # output tokens before row 0's
        for j in range(logits.shape[1]):
            if j > 0:
                draft = drafts[:, j - 1, None]
                total.scatter_add_(1, draft, each)
                seen.scatter_(1, draft, True)
            row = logits[:, j]
            row += -total - torch.where(seen, presence, 0.0)
            early = (emitted + j < self.min_new[slot])[:, None]
            row.masked_fill_(early & self.held_back[slot], -torch.inf)
            scale = torch.where(seen, repetition, 1.0)
            row.copy_(torch.where(row < 0, row * scale, row / scale))
