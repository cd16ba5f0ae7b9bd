"""The DSpark worker on stand-ins for SGLang's runners, with batches as the scheduler makes them.

The worker, its slot state and the state life cycle are the real ones; the two models are functions
of the test. R requests, V verify rows, N tokens in the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from dspark.host import forwards
from dspark.host import worker as worker_module
from dspark.host.worker import DSparkWorker
from dspark.kernels.linear import prepare_bf16
from dspark.state import StateGeometry, StateLifecycle

GAMMA, VOCAB, HIDDEN, RANK, SLOTS, TABLE = 5, 64, 16, 8, 9, 512


@dataclass
class Ranks:
    pp_rank: int = 0


class StandIns:
    """What the worker touches of SGLang.

    target: function of candidates i64 [R, V] giving logits f32 [R * V, N]; prompts give `prompt`.
        Rows that do not run have token 0 where rows are packed.
    """

    def __init__(self, target: Callable[[torch.Tensor], torch.Tensor], width: int):
        self.target, self.width = target, width
        self.prompt = torch.zeros(0, VOCAB)
        generator = torch.Generator().manual_seed(1)
        self.random = lambda *shape: torch.randn(shape, generator=generator)
        self.injected: list[tuple[torch.Tensor, torch.Tensor]] = []  # window slots, positions
        self.launched: list[int] = []  # rows of each verify forward
        self.drafted = 0  # draft forwards
        geometry = StateGeometry.for_model(
            slots=SLOTS, window_pages=4, verify_width=width, c4_layers=1, c128_layers=1
        )
        self.state = StateLifecycle(geometry, "cpu")
        self.rows_run = torch.zeros(SLOTS + 1, dtype=torch.int64)
        # Every request slot owns TABLE token slots; its window slot is one higher.
        first = torch.arange(SLOTS + 1)[:, None] * TABLE
        self.table = (first + torch.arange(TABLE)).to(torch.int32)
        self.window = torch.arange((SLOTS + 1) * TABLE) + 1

    def worker(self, monkeypatch) -> DSparkWorker:
        bundle = SimpleNamespace(
            draft_worker=SimpleNamespace(alloc_memory_pool=lambda **_: None),
            draft_model_runner=SimpleNamespace(
                forward=self._draft,
                attn_backend=None,
                token_to_kv_pool=SimpleNamespace(full_to_swa_index_mapping=self.window),
            ),
            draft_model=self._draft_model(),
        )
        monkeypatch.setattr(worker_module, "build_draft_tp_worker", lambda **_: bundle)
        monkeypatch.setattr(
            forwards.DFlashVerifyInput,
            "prepare_for_verify",
            lambda rows, batch, _: ((rows, batch), False),
        )
        made = DSparkWorker(
            SimpleNamespace(speculative_num_draft_tokens=self.width, enable_metrics=False),
            gpu_id=0,
            ps=Ranks(),
            nccl_port=0,
            target_worker=self._target_worker(),
        )
        made.alloc_memory_pool()
        return made

    def _target_worker(self) -> Any:
        forward = SimpleNamespace(meta=SimpleNamespace(window_slot=None, pos=None))
        runner = SimpleNamespace(
            model_config=SimpleNamespace(context_len=TABLE),
            model=SimpleNamespace(get_input_embeddings=lambda: None, lm_head=None),
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            attn_backend=SimpleNamespace(rows_run=self.rows_run, forward_metadata=forward),
            token_to_kv_pool=SimpleNamespace(state=self.state),
        )
        return SimpleNamespace(
            model_runner=runner,
            device="cpu",
            random_seed=3,
            forward_batch_generation=self._target,
        )

    def _target(self, batch, forward_batch=None, **_) -> GenerationBatchResult:
        logits = self.prompt.clone()
        if forward_batch is not None:
            logits = self._verified(*forward_batch)
        seen = SimpleNamespace(next_token_logits=logits, hidden_states=torch.zeros(len(logits), 4))
        return GenerationBatchResult(logits_output=seen)

    def _verified(self, rows, batch) -> torch.Tensor:
        """Logits of the rows that were launched, packed or not."""
        tokens, requests = rows.draft_token, len(batch.reqs)
        self.launched.append(len(tokens))
        if len(tokens) == requests * self.width:
            return self.target(tokens.view(requests, self.width))
        run = self.rows_run[batch.req_pool_indices]
        real = torch.arange(self.width) < run[:, None]
        assert len(tokens) == len(batch.out_cache_loc) == len(rows.positions) == int(real.sum())
        candidates = torch.zeros(real.shape, dtype=torch.int64)
        candidates[real] = tokens
        return self.target(candidates)[real.flatten()]

    def _draft(self, forward_batch) -> Any:
        self.drafted += 1
        rows = forward_batch.input_ids.shape[0]
        out = SimpleNamespace(
            next_token_logits=self.random(rows, VOCAB), hidden_states=self.random(rows, HIDDEN)
        )
        return SimpleNamespace(logits_output=out)

    def _draft_model(self) -> Any:
        return SimpleNamespace(
            attach_shared_modules=lambda *_: None,
            group=None,
            rank=0,
            config=SimpleNamespace(
                dspark=SimpleNamespace(block_size=GAMMA, noise_token_id=VOCAB - 1),
                vocab_size=VOCAB,
            ),
            weights=SimpleNamespace(
                markov_w1=self.random(VOCAB, RANK),
                markov_w2=prepare_bf16(self.random(VOCAB, RANK)),
                confidence=self.random(HIDDEN + RANK),
            ),
            inject=lambda captures, slot, position, backend: self.injected.append((slot, position)),
        )


def request(prompt_len: int, name: str = "r", **sampling: Any) -> Any:
    """A Req as far as the worker looks."""
    return SimpleNamespace(
        rid=name,
        sampling_params=SamplingParams(max_new_tokens=99, **sampling),
        origin_input_ids=[4] * prompt_len,
        output_ids=[],
        tokenizer=SimpleNamespace(eos_token_id=1, additional_stop_token_ids=None),
        eos_token_ids={1},
    )


def prompt_batch(reqs: Sequence[Any], slot: torch.Tensor) -> Any:
    lengths = torch.tensor([len(req.origin_input_ids) for req in reqs])
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        is_extend_in_batch=True,
        is_prefill_only=False,
        reqs=list(reqs),
        req_pool_indices=slot,
        req_pool_indices_cpu=slot,
        seq_lens=lengths,
        sampling_info=_sampling_info(reqs),
        return_logprob=False,
    )


def decode_batch(after: Any, result: GenerationBatchResult) -> Any:
    """The step after `result` of batch `after`."""
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        is_extend_in_batch=False,
        reqs=after.reqs,
        req_pool_indices=after.req_pool_indices,
        seq_lens=result.new_seq_lens,
        spec_info=result.next_draft_input,
        sampling_info=_sampling_info(after.reqs),
        has_grammar=False,
        return_logprob=False,
    )


def _sampling_info(reqs: Sequence[Any]) -> Any:
    """A SamplingBatchInfo without grammar, bias or custom processors."""
    params = [req.sampling_params for req in reqs]
    top_ks = torch.tensor([p.top_k for p in params], dtype=torch.int32)
    return SimpleNamespace(
        temperatures=torch.tensor([[p.temperature] for p in params]),
        top_ks=top_ks,
        top_ps=torch.tensor([p.top_p for p in params]),
        min_ps=torch.tensor([p.min_p for p in params]),
        need_top_k_sampling=any(p.top_k != TOP_K_ALL for p in params),
        need_top_p_sampling=any(p.top_p != 1 for p in params),
        need_min_p_sampling=any(p.min_p > 0 for p in params),
        is_all_greedy=all(p.top_k <= 1 for p in params),
        logit_bias=None,
        has_custom_logit_processor=False,
        grammar_mask=None,
        update_regex_vocab_mask=lambda: None,
    )
