"""The DSpark worker: draft, schedule, verify, accept, roll back, commit.

SGLang's scheduler calls `forward_batch_generation` with a prompt batch or with a decode batch.
A decode step runs the draft once and the target once, and emits 1 to depth + 1 tokens a request.
Shapes depend on the batch size only; what varies (lengths, counts, budgets) stays on the device,
so no step waits for the GPU. R requests, V = depth + 1 verify rows, gamma = block size, N tokens
in the vocabulary.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.draft_worker_common import (
    build_draft_tp_worker,
    make_draft_block_spec_info,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from dspark.host import logprobs
from dspark.host.draft_input import DraftInput, draft_input
from dspark.kernels.accept import Accept, accept_greedy, accept_sampled
from dspark.kernels.collective import gather_vocab
from dspark.kernels.draft import confidence, markov_block
from dspark.speculation import forced_drafts, ranks, sampling
from dspark.speculation.budget import VerifyLengths
from dspark.speculation.monitor import AcceptanceMonitor
from dspark.speculation.penalties import Penalties, is_penalised
from dspark.speculation.sampling import RequestParams
from dspark.speculation.settings import Settings
from dspark.target.draft import block_ids


class Step(NamedTuple):
    """The batch as one decode step sees it."""

    slot: torch.Tensor  # i64 [R] request slots
    prefix: torch.Tensor  # i64 [R] committed tokens; the bonus token sits at this position
    bonus: torch.Tensor  # i64 [R] last emitted token
    pos: torch.Tensor  # i64 [R, V] positions of the verify rows
    loc: torch.Tensor  # i64 [R, V] their full-pool slots
    params: RequestParams


class Proposal(NamedTuple):
    tokens: torch.Tensor  # i64 [R, depth]
    logits: torch.Tensor | None  # f32 [R, depth, N] proposal distribution; None = deterministic
    confidence: torch.Tensor  # f32 [R, gamma]
    raw: torch.Tensor  # f32 [R, gamma] confidence logits


class DSparkWorker(BaseSpecWorker):
    """Speculative worker of SGLang's scheduler for DeepSeek-V4 with a DSpark draft."""

    def __init__(self, server_args, gpu_id, ps, nccl_port, target_worker):
        super().__init__()
        self.server_args = server_args
        self._target_worker = target_worker
        self.target_runner = target_worker.model_runner
        self.device = target_worker.device
        bundle = build_draft_tp_worker(
            server_args=server_args,
            gpu_id=gpu_id,
            ps=replace(ps, pp_rank=0),
            nccl_port=nccl_port,
            target_model_config=self.target_runner.model_config,
            algo_label="DSPARK",
            attention_backend_override="dsv4",
        )
        self._draft_worker = bundle.draft_worker
        self.draft_runner = bundle.draft_model_runner
        self.draft = bundle.draft_model
        target = self.target_runner.model
        self.draft.attach_shared_modules(target.get_input_embeddings(), target.lm_head)
        self.group = self.draft.group
        self.config = self.draft.config.dspark
        self.vocab = self.draft.config.vocab_size
        self.gamma = self.config.block_size
        self.rows = int(server_args.speculative_num_draft_tokens)
        self.depth = self.rows - 1
        self.monitor = AcceptanceMonitor(self.depth)
        self.settings = Settings.from_environment(self.gamma)

    def __getattr__(self, name):
        # The scheduler treats the speculative worker as the model worker.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    # Life cycle.

    def alloc_memory_pool(self, **pools) -> None:
        super().alloc_memory_pool(**pools)
        slots = self.target_runner.req_to_token_pool.req_to_token.shape[0]
        self.offsets = torch.arange(self.rows, device=self.device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.penalties: Penalties | None = None  # built when the first request asks for one
        self.scheduler = self.settings.scheduler(self.depth, slots, self.device)
        self.temperatures = self.settings.confidence_temperatures(self.device)
        self.block_info = make_draft_block_spec_info(draft_token_num=self.gamma, device=self.device)
        self.forced = forced_drafts.from_environment(
            slots,
            self.target_runner.model_config.context_len,
            self.depth,
            self.vocab,
            self.device,
        )

    @property
    def spec_v2_attn_backends(self) -> tuple:
        return self.target_runner.attn_backend, self.draft_runner.attn_backend

    @property
    def state(self):
        return self.target_runner.token_to_kv_pool.state

    # One batch.

    @torch.no_grad()
    def forward_batch_generation(
        self, batch, on_publish=None, grammar_barrier=None
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def _prefill(self, batch, on_publish) -> GenerationBatchResult:
        """Run prompt rows; the draft learns of all of them before the scheduler moves any page."""
        self._admit(batch)
        out = self._target_worker.forward_batch_generation(
            batch,
            # Sampled here, by the numbers the rest of the request is sampled by.
            is_verify=not batch.is_prefill_only,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        if not batch.is_prefill_only:
            out.next_token_ids = self._first_tokens(batch, out.logits_output)
        meta = self.target_runner.attn_backend.forward_metadata
        self.draft.inject(
            out.logits_output.hidden_states, meta.swa_loc, meta.pos, self.draft_runner.attn_backend
        )
        out.logits_output.hidden_states = None
        out.new_seq_lens = batch.seq_lens
        out.next_draft_input = draft_input(out.next_token_ids.clamp(min=0), batch.seq_lens)
        if on_publish is not None:
            on_publish(batch.seq_lens)
        return out

    def _decode(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        step = self._begin(batch)
        proposal = self._propose(batch, step)
        lengths = self.scheduler.lengths(proposal.confidence, step.slot)
        candidates, lengths = self._agree_on_rows(step, proposal, lengths)
        grammar = _grammar_tree(batch, candidates)

        out = self._verify(batch, step, candidates, lengths)
        logits = out.logits_output.next_token_logits
        mask = _grammar_mask(batch, grammar, logits.device, grammar_barrier)
        self._adjust(batch, logits, mask, step.slot, candidates, step.prefix)
        accept = self._accept(step, candidates, logits, proposal, lengths)
        if on_publish is not None:
            on_publish(accept.new_len)

        self._roll_back(step, accept, lengths)
        self._commit(batch, step, accept, out.logits_output.hidden_states)
        self._collect(proposal, accept)
        if batch.return_logprob:
            logprobs.attach(out.logits_output, logits, accept.tokens, batch)
        out.logits_output.hidden_states = None
        return GenerationBatchResult(
            logits_output=out.logits_output,
            next_token_ids=self._emitted(accept, logits).flatten(),
            accept_lens=accept.commit_len,
            block_accept_lens=accept.commit_len + accept.trimmed,
            cap_lens=lengths.count,
            can_run_cuda_graph=out.can_run_cuda_graph,
            next_draft_input=draft_input(accept.bonus, accept.new_len),
            new_seq_lens=accept.new_len,
            speculative_num_draft_tokens=self.rows,
        )

    # The parts of a prompt batch.

    def _admit(self, batch) -> None:
        """Set the slots of these requests up; a chunk of a long prompt does it again."""
        slots = batch.req_pool_indices_cpu.tolist()
        seeds = [
            sampling.request_seed(
                self._target_worker.random_seed, req.rid, req.sampling_params.sampling_seed
            )
            for req in batch.reqs
        ]
        slot = batch.req_pool_indices
        self.seeds[slot] = torch.tensor(seeds, dtype=torch.int64).to(self.device)
        self.scheduler.admit(slot)
        if self.penalties is None and _any_penalised(batch):
            self.penalties = Penalties(len(self.seeds), self.vocab, self.device)
        if self.penalties is not None:
            self.penalties.admit(slots, batch.reqs)
        if self.forced is not None:
            self.forced.admit(slots, batch.reqs)

    def _first_tokens(self, batch, logits_output) -> torch.Tensor:
        """i64 [R] token after each prompt; -1 where the target gave no usable distribution."""
        logits = logits_output.next_token_logits
        info, slot, position = batch.sampling_info, batch.req_pool_indices, batch.seq_lens
        info.update_regex_vocab_mask()
        self._adjust(batch, logits, info.grammar_mask, slot, slot[:, None], position - 1)
        info.grammar_mask = None
        params = sampling.request_params(info)
        kept = sampling.cut_tails(logits[:, None], params)[:, 0]
        tokens = ranks.agree(sampling.draw(kept, params, self.seeds[slot], position), self.group)
        if batch.return_logprob:
            logprobs.attach(logits_output, logits, tokens[:, None], batch)
        if self.penalties is not None and _any_penalised(batch):
            self.penalties.commit(slot, tokens[:, None], torch.ones_like(tokens))
        return torch.where(_has_choice(logits), tokens, -1)

    # The parts of a decode step, in the order they run.

    def _begin(self, batch) -> Step:
        drafts: DraftInput = batch.spec_info
        slot, prefix = batch.req_pool_indices, batch.seq_lens.to(torch.int64)
        table = self.target_runner.req_to_token_pool.req_to_token
        pos = prefix[:, None] + self.offsets
        # A finished request may run one step more than its row of the table holds.
        loc = table[slot[:, None], pos.clamp(max=table.shape[1] - 1)].to(torch.int64)
        bonus = drafts.bonus_tokens.to(torch.int64)
        return Step(slot, prefix, bonus, pos, loc, sampling.request_params(batch.sampling_info))

    def _propose(self, batch, step: Step) -> Proposal:
        """Draft a whole block: its width is what the draft was trained with."""
        requests = step.slot.shape[0]
        ids = block_ids(step.bonus, self.gamma, self.config.noise_token_id)
        positions = step.prefix[:, None] + torch.arange(self.gamma, device=ids.device)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=requests,
            input_ids=ids,
            req_pool_indices=step.slot,
            seq_lens=batch.seq_lens,
            out_cache_loc=torch.zeros_like(ids),  # the backend finds the slots itself
            seq_lens_sum=None,
            seq_lens_cpu=None,
            positions=positions.flatten(),
            spec_algorithm=SpeculativeAlgorithm.DSPARK,
            spec_info=self.block_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        out = self.draft_runner.forward(forward_batch).logits_output
        weights, sampled = self.draft.weights, not step.params.all_greedy
        base = out.next_token_logits.view(requests, self.gamma, -1)
        block = markov_block(
            base,
            step.bonus,
            weights.markov_w1,
            weights.markov_w2,
            temperature=step.params.temperature if sampled else None,
            greedy=step.params.greedy if sampled else None,
            seed=self.seeds[step.slot] if sampled else None,
            prefix_len=step.prefix if sampled else None,
            vocab_start=self.draft.rank * base.shape[2],
            group=self.group,
        )
        followed = torch.cat([step.bonus[:, None], block.tokens[:, :-1]], 1)
        trust = confidence(
            out.hidden_states.view(requests, self.gamma, -1),
            followed,
            weights.markov_w1,
            weights.confidence,
            self.temperatures,
        )
        tokens = block.tokens[:, : self.depth]
        logits = gather_vocab(block.logits, self.group)[:, : self.depth] if sampled else None
        if self.forced is not None:
            tokens, logits = self.forced.replace(tokens, logits, step.slot, step.prefix)
        return Proposal(tokens, logits, trust.probability, trust.logit)

    def _agree_on_rows(
        self, step: Step, proposal: Proposal, lengths: VerifyLengths
    ) -> tuple[torch.Tensor, VerifyLengths]:
        """Candidates i64 [R, V] and verify lengths, the same on every rank."""
        candidates = torch.cat([step.bonus[:, None], proposal.tokens], 1)
        if self.group is None:
            return candidates, lengths
        agreed = ranks.agree(
            torch.cat([candidates, lengths.run[:, None], lengths.count[:, None]], 1), self.group
        )
        run, count = agreed[:, self.rows].to(torch.int32), agreed[:, self.rows + 1].to(torch.int32)
        return agreed[:, : self.rows].contiguous(), VerifyLengths(run, count)

    def _verify(self, batch, step: Step, candidates: torch.Tensor, lengths: VerifyLengths):
        """Target forward of all R * V rows; those beyond `lengths.run` are padding."""
        backend = self.target_runner.attn_backend
        backend.verify_rows[step.slot] = lengths.run.to(torch.int64)
        rows = DFlashVerifyInput(
            draft_token=candidates.flatten(),
            positions=step.pos.flatten(),
            draft_token_num=self.rows,
            custom_mask=None,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            ragged_verify_layout=None,
        )
        batch.out_cache_loc = step.loc.flatten()
        forward_batch, _ = rows.prepare_for_verify(batch, self._target_worker)
        return self._target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )

    def _adjust(self, batch, logits, mask, slot, candidates, prefix) -> None:
        """Turn raw logits into those the requests asked for, in place."""
        rows = candidates.shape[1]
        if self.penalties is not None and _any_penalised(batch):
            by_request = logits.view(len(batch.reqs), rows, -1)
            self.penalties.apply(by_request, slot, candidates, prefix)
        sampling.adjust(logits, batch.sampling_info, rows, mask)

    def _accept(
        self, step: Step, candidates, logits, proposal: Proposal, lengths: VerifyLengths
    ) -> Accept:
        common: dict[str, Any] = {
            "verify_len": lengths.count,
            "prefix_len": step.prefix,
            "rows_run": lengths.run,
        }
        if step.params.all_greedy:
            accept = accept_greedy(candidates, logits, **common)
        else:
            kept = sampling.cut_tails(logits.view(*candidates.shape, -1), step.params)
            accept = accept_sampled(
                candidates,
                kept.view(logits.shape),
                proposal.logits,
                temperature=step.params.temperature,
                greedy=step.params.greedy,
                seed=self.seeds[step.slot],
                **common,
            )
        return ranks.agree_on_accept(accept, step.prefix, self.group)

    def _roll_back(self, step: Step, accept: Accept, lengths: VerifyLengths) -> None:
        """Empty the C128 rows of rejected drafts; nothing reads them, and so nothing can."""
        if self.settings.clear_rejected:
            self.state.rollback.after_verify(step.slot, step.prefix, accept.commit_len, lengths.run)

    def _commit(self, batch, step: Step, accept: Accept, captures: torch.Tensor) -> None:
        """Give the draft the target's view of the committed tokens, and of no others."""
        committed = self.offsets < accept.commit_len[:, None]
        window = self.draft_runner.token_to_kv_pool.full_to_swa_index_mapping[step.loc]
        loc = torch.where(committed, window, -1).to(torch.int32)
        self.draft.inject(
            captures, loc.flatten(), step.pos.flatten(), self.draft_runner.attn_backend
        )
        if self.penalties is not None and _any_penalised(batch):
            self.penalties.commit(step.slot, accept.tokens, accept.commit_len)

    def _emitted(self, accept: Accept, logits: torch.Tensor) -> torch.Tensor:
        """i64 [R, V] tokens for the host; -1 marks a request whose logits are broken."""
        last = accept.accepted.long()[:, None]
        row = torch.arange(len(last), device=logits.device) * self.rows + last[:, 0]
        broken = ~_has_choice(logits[row])[:, None]
        return torch.where(broken & (self.offsets == last), -1, accept.tokens)

    # What the scheduler asks and tells besides.

    def _collect(self, proposal: Proposal, accept: Accept) -> None:
        if self.settings.samples is not None and self.draft.rank == 0:
            self.settings.samples.add(proposal.raw, accept.accepted)

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        self.monitor.record(num_correct_drafts_per_req)

    def set_dspark_forced_budget_frac(self, frac: float | None) -> None:
        """Fix the verify budget to a share of all drafts (SGLang's `set_internal_state`)."""
        self.scheduler.forced_share = frac

    def dump_info_records(self) -> dict[str, Any]:
        """The `dspark` section of `/server_info`."""
        return {
            "block_size": self.gamma,
            "depth": self.depth,
            "forced_drafts": self.forced is not None,
            **self.settings.report(),
            **self.monitor.report(),
        }

    def clear_info_records(self) -> None:
        self.monitor = AcceptanceMonitor(self.depth)

    def block_accept_estimate_log_suffix(self) -> str | None:
        return self.monitor.warning


def _any_penalised(batch) -> bool:
    return any(is_penalised(req.sampling_params) for req in batch.reqs)


def _has_choice(logits: torch.Tensor) -> torch.Tensor:
    """f32 [R, N] -> bool [R]: some token has a finite or +inf logit."""
    return (logits > -torch.inf).any(-1)


def _grammar_tree(batch, candidates: torch.Tensor):
    """Start copying the candidates to the host, where grammars live."""
    if not batch.has_grammar:
        return None
    from sglang.srt.speculative.spec_utils import GrammarTree

    return GrammarTree.from_linear_chain(candidates)


def _grammar_mask(batch, tree, device, barrier):
    """One mask row per verify row, along the candidates; waits for the previous step's tokens."""
    if tree is None:
        return None
    from sglang.srt.speculative.spec_utils import build_grammar_vocab_mask

    return build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=tree,
        sampling_info=batch.sampling_info,
        device=device,
        barrier=barrier,
    )
