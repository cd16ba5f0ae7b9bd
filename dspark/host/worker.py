"""The DSpark worker: between SGLang's scheduler and the steps of `dspark.speculation`.

The scheduler calls `forward_batch_generation` with a prompt batch or with a decode batch. A decode
step runs the draft once and the target once, and emits 1 to depth + 1 tokens a request. On a GPU
shapes depend on the batch size only; what varies (lengths, counts, budgets) stays on the device, so
no step waits for it. On a CPU the host knows the counts, and the target runs no row too many.
R requests, V = depth + 1 verify rows, gamma = block size, N tokens in the vocabulary.
`docs/a-step.md` follows one step through the files.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.draft_worker_common import (
    build_draft_tp_worker,
    make_draft_block_spec_info,
)

from dspark.host import forwards, metrics, sampling_info, step_costs
from dspark.host.draft_input import draft_input
from dspark.host.step_result import StepResult
from dspark.kernels.accept import Accept
from dspark.kernels.collective import gather_vocab, transport
from dspark.kernels.common.argmax import token_of
from dspark.speculation import forced_drafts, ranks, sampling
from dspark.speculation.accept import accept, committed_slots
from dspark.speculation.budget import Mode, VerifyRows, same_rows
from dspark.speculation.draft_gate import DraftGate, Result
from dspark.speculation.monitor import AcceptanceMonitor
from dspark.speculation.packing import Packing, packing_of
from dspark.speculation.penalties import Penalties, any_penalised
from dspark.speculation.propose import DraftHead, Proposal, propose, with_bonus
from dspark.speculation.sampling import BROKEN, Requests
from dspark.speculation.settings import Settings
from dspark.speculation.step_cost import Source, StepCost
from dspark.speculation.step_timer import StepTimer
from dspark.speculation.turn import DRAFT, NO_DRAFT, Turn
from dspark.state.upload import Upload
from dspark.target.draft import block_ids


class Places(NamedTuple):
    """Where the verify rows of a step stand. i64 [R, V] each."""

    position: torch.Tensor
    token_slot: torch.Tensor  # slots of the full pool


class Judged(NamedTuple):
    """Logits of the verify rows, as the requests asked for them."""

    logits: torch.Tensor  # f32 [R * V, N or this rank's columns], or packed [T, ...]
    packing: Packing | None  # layout of `logits`
    first_column: int | None  # token of the first column where these are this rank's; None: all
    broken: torch.Tensor  # bool [R * V] this rank's columns held a NaN before anything was added


class DSparkWorker(BaseSpecWorker):
    """Speculative worker of SGLang's scheduler for DeepSeek-V4 with a DSpark draft."""

    def __init__(self, server_args, gpu_id, ps, nccl_port, target_worker):
        super().__init__()
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
        self.columns = self.vocab // (1 if self.group is None else self.group.size())
        self.first_column = self.draft.rank * self.columns
        # Ranks whose counts differ, for a fault, must still meet in forwards of one shape.
        self.packs = torch.device(self.device).type == "cpu" and self.group is None
        self.gamma = self.config.block_size
        self.verify_width = int(server_args.speculative_num_draft_tokens)
        self.depth = self.verify_width - 1
        self.speculative_num_steps = self.depth  # what SGLang's metrics show as draft steps
        self.monitor = AcceptanceMonitor(self.depth)
        self.counters = metrics.counters_of(server_args, self.draft.rank, self.depth)
        self.settings = Settings.from_environment(self.gamma)
        self.server_args = server_args
        self.timer: StepTimer | None = None  # while steps are measured

    # Life cycle.

    def alloc_memory_pool(self, **pools) -> None:
        super().alloc_memory_pool(**pools)
        slots = self.target_runner.req_to_token_pool.req_to_token.shape[0]
        self.row = torch.arange(self.verify_width, device=self.device)
        self.upload = Upload(8 * slots, torch.device(self.device))
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.seeded = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self.penalties: Penalties | None = None  # built when the first request asks for one
        self.scheduler = self.settings.scheduler(self.depth, slots, self.device)
        self.calibration = self.settings.online_calibration(self.device)
        self._find_costs()
        self.block_info = make_draft_block_spec_info(draft_token_num=self.gamma, device=self.device)
        self.head = DraftHead(
            self.draft.weights.markov_w1,
            self.draft.weights.markov_w2,
            self.draft.weights.confidence,
            self.settings.confidence_temperatures(self.device),
            self.draft.rank,
            self.group,
        )
        self.forced = forced_drafts.from_environment(
            slots,
            self.target_runner.model_config.context_len,
            self.depth,
            self.vocab,
            self.device,
            self.draft.rank,
        )

    def _find_costs(self) -> None:
        """What steps cost, as the operator or an earlier start says."""
        if not self.settings.measures_steps:
            given = self.settings.cost
            self._use_costs(given, Source.NONE if given is None else Source.GIVEN)
            return
        described = step_costs.describe(self.server_args, self.device)
        kept = step_costs.find_kept(described, self.group)
        self._use_costs(kept, Source.WANTED if kept is None else Source.KEPT)

    def _use_costs(self, cost: StepCost | None, source: Source) -> None:
        self.scheduler.cost, self.cost_source = cost, source
        self.gate: DraftGate | None = None
        if cost is not None and self.settings.mode is Mode.SCHEDULED:
            self.gate = DraftGate(cost, self.depth)

    def measure_steps(self, begin: bool) -> None:
        """Begin to measure what steps cost, or end that and go by it. All ranks do it at once."""
        timer, self.timer = self.timer, StepTimer(self.depth) if begin else None
        if begin or timer is None:
            return
        described = step_costs.describe(self.server_args, self.device)
        cost = step_costs.made(timer.samples, self.depth, described, self.group)
        if cost is not None:
            self._use_costs(cost, Source.MEASURED)

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
        if self.timer is not None:
            self.timer.interrupt()
        self._admit(batch)
        out = self._target_worker.forward_batch_generation(
            batch,
            # Sampled here, by the numbers the rest of the request is sampled by.
            is_verify=not batch.is_prefill_only,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        if not batch.is_prefill_only:
            out.next_token_ids = self._first_tokens(batch, out.logits_output)
        meta = self.target_runner.attn_backend.forward_metadata.meta
        self._show_draft(out.logits_output, meta.window_slot, meta.pos)
        out.new_seq_lens = batch.seq_lens
        out.next_draft_input = draft_input(out.next_token_ids.clamp(min=0), batch.seq_lens)
        if on_publish is not None:
            on_publish(batch.seq_lens)
        return out

    def _decode(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        turn = self._turn(batch)
        requests = sampling_info.requests_of(batch, self.seeds, self.seeded)
        places = self._places(requests)
        proposal = self._propose(batch, requests) if turn.draft else None
        rows = self._schedule(proposal, requests, turn)
        candidates = with_bonus(requests, self._drafts(proposal, requests))

        packing = packing_of(rows.run, self.verify_width) if self.packs else None

        out, judged = self._verify(
            batch, requests, places, candidates, rows, packing, grammar_barrier
        )
        outcome = accept(
            candidates,
            judged.logits,
            proposal,
            requests,
            rows,
            self.group,
            judged.first_column,
            judged.packing,
        )
        agreement = ranks.compare_steps(
            candidates, rows, outcome, judged.logits, judged.broken, self.group, judged.packing
        )
        if on_publish is not None:
            on_publish(outcome.new_len)

        self._learn(proposal, requests, outcome, rows)
        self._commit(batch, requests, places, outcome, rows, packing, out.logits_output)
        self._collect(proposal, outcome)
        if batch.return_logprob:
            sampling_info.store_logprobs(out.logits_output, judged.logits, outcome.tokens, batch)
        return StepResult(
            logits_output=out.logits_output,
            next_token_ids=ranks.emitted(outcome, agreement).flatten(),
            accept_lens=outcome.commit_len,
            block_accept_lens=outcome.commit_len + outcome.trimmed,
            cap_lens=rows.acceptable,
            can_run_cuda_graph=out.can_run_cuda_graph,
            next_draft_input=draft_input(outcome.bonus, outcome.new_len),
            new_seq_lens=outcome.new_len,
            speculative_num_draft_tokens=self.verify_width,
            turn=turn,
        )

    # The parts of a prompt batch.

    def _admit(self, batch) -> None:
        """Set the slots of these requests up; a chunk of a long prompt does it again."""
        slot = batch.req_pool_indices
        seeds = sampling_info.seeds_of(batch.reqs, self._target_worker.random_seed)
        self.seeds[slot] = self.upload(seeds)
        seeded = [req.sampling_params.sampling_seed is not None for req in batch.reqs]
        self.seeded[slot] = self.upload(torch.tensor(seeded))
        self.scheduler.admit(slot)
        if self.penalties is None and any_penalised(batch.reqs):
            self.penalties = Penalties(len(self.seeds), self.vocab, self.device)
        if self.penalties is not None:
            self.penalties.admit(slot, batch.reqs)
        if self.forced is not None:
            self.forced.admit(batch.req_pool_indices_cpu.tolist(), batch.reqs)

    def _first_tokens(self, batch, logits_output) -> torch.Tensor:
        """i64 [R] token after each prompt; -1 where the target gave no usable distribution."""
        logits = logits_output.next_token_logits
        info, slot, position = batch.sampling_info, batch.req_pool_indices, batch.seq_lens
        broken = ranks.broken_rows(self._own_columns(logits), self.group)
        info.update_regex_vocab_mask()
        no_drafts = slot.new_empty(len(slot), 0)
        self._adjust(batch, logits, info.grammar_mask, slot, no_drafts, position - 1)
        info.grammar_mask = None
        params = sampling_info.request_params(info)
        choice = sampling.draw(logits, params, self.seeds[slot], position.to(torch.int64))
        tokens = token_of(choice)
        agreement = ranks.compare(tokens[:, None], ranks.has_choice(logits), broken, self.group)
        if batch.return_logprob:
            sampling_info.store_logprobs(logits_output, logits, tokens[:, None], batch)
        self._count(batch, slot, tokens[:, None], torch.ones_like(tokens))
        chosen = torch.where(agreement.has_choice, tokens, BROKEN)
        return ranks.mark(chosen[:, None], agreement)[:, 0]

    # The parts of a decode step, in the order they run.

    def _turn(self, batch) -> Turn:
        """What the step does, by what the host knows."""
        if self.timer is not None:
            return self.timer.turn(len(batch.reqs))
        if self.forced is not None and forced_drafts.nobody_drafts(batch.reqs):
            return NO_DRAFT
        if self.gate is None or self.scheduler.is_forced:
            return DRAFT
        return self.gate.turn([sampling_info.is_sampled(req.sampling_params) for req in batch.reqs])

    def _places(self, requests: Requests) -> Places:
        table = self.target_runner.req_to_token_pool.req_to_token
        position = requests.committed[:, None] + self.row
        # A finished request may run one step more than its row of the table holds.
        inside = position.clamp(max=table.shape[1] - 1)
        return Places(position, table[requests.slot[:, None], inside].to(torch.int64))

    def _propose(self, batch, requests: Requests) -> Proposal:
        """Draft a whole block: its width is what the draft was trained with."""
        ids = block_ids(requests.bonus, self.gamma, self.config.noise_token_id)
        out = forwards.run_draft_block(self.draft_runner, batch, requests, ids, self.block_info)
        return propose(
            out.next_token_logits, out.hidden_states, requests, self.head, self.depth, self.forced
        )

    def _schedule(self, proposal: Proposal | None, requests: Requests, turn: Turn) -> VerifyRows:
        if proposal is None:
            return same_rows(requests.slot, 1, 1)
        if turn.measured is not None:
            return same_rows(requests.slot, 1 + turn.measured, 1)
        if turn.explore:
            self.scheduler.admit(requests.slot)
        trust = proposal.confidence
        if self.calibration is not None:
            trust = self.calibration.corrected(trust, requests.params.temperature > 0)
        return self.scheduler.rows(trust, requests.slot)

    def _drafts(self, proposal: Proposal | None, requests: Requests) -> torch.Tensor:
        """i64 [R, depth] tokens; where nothing was drafted no row of them runs."""
        if proposal is not None:
            return proposal.tokens
        return requests.bonus.new_zeros(len(requests.bonus), self.depth)

    def _learn(
        self, proposal: Proposal | None, requests: Requests, outcome: Accept, rows: VerifyRows
    ) -> None:
        if self.calibration is None:
            return
        sampled = requests.params.temperature > 0
        if proposal is None:
            self.calibration.age(sampled)
            return
        right = outcome.accepted + outcome.trimmed
        self.calibration.learn(proposal.confidence, sampled, right, rows.run)

    def _verify(
        self,
        batch,
        requests: Requests,
        places: Places,
        candidates,
        rows: VerifyRows,
        packing: Packing | None,
        barrier,
    ) -> tuple[GenerationBatchResult, Judged]:
        """Run the packed rows, or all R * V: those beyond `rows.run` are padding then."""
        tree = sampling_info.grammar_tree(batch, candidates)
        backend = self.target_runner.attn_backend
        backend.rows_run[requests.slot] = rows.run.to(torch.int64)
        out = forwards.run_verify_rows(self._target_worker, batch, candidates, *places, packing)
        logits = out.logits_output.next_token_logits
        broken = ranks.broken_rows(logits, self.group)
        if packing is not None:
            broken = packing.spread(broken, False)
        mask = sampling_info.grammar_mask(batch, tree, logits.device, barrier)
        plain = sampling_info.only_chooses(batch, mask)
        first_column: int | None = self.first_column
        if not (plain and requests.params.all_greedy):
            logits, first_column = gather_vocab(logits, self.group), None
        if plain:
            return out, Judged(logits, packing, first_column, broken)
        if packing is not None:  # what follows knows the full width only
            logits = packing.spread(logits, 0.0)
        self._adjust(batch, logits, mask, requests.slot, candidates[:, 1:], requests.committed)
        return out, Judged(logits, None, first_column, broken)

    def _adjust(self, batch, logits, mask, slot, drafts, position) -> None:
        """Turn raw logits f32 [R * V, N] into those the requests asked for, in place.

        Row j of a request follows drafts 0..j-1 (i64 [R, V - 1]); `position` is that of the last
        emitted token.
        """
        by_request = logits.view(len(batch.reqs), drafts.shape[1] + 1, -1)
        if (penalties := self._penalties(batch)) is not None:
            penalties.apply(by_request, slot, drafts, position)
        sampling_info.adjust(by_request, batch.sampling_info, mask)

    def _commit(
        self,
        batch,
        requests: Requests,
        places: Places,
        outcome: Accept,
        rows: VerifyRows,
        packing: Packing | None,
        seen,
    ) -> None:
        """Take rejected rows back, and show the draft the committed ones and no others."""
        if self.settings.clear_rejected:
            self.target_runner.token_to_kv_pool.state.rollback.after_verify(
                requests.slot, requests.committed, outcome.commit_len, rows.run
            )
        to_window = self.draft_runner.token_to_kv_pool.full_to_swa_index_mapping
        kept = committed_slots(to_window[places.token_slot], outcome.commit_len)
        position = places.position.flatten()
        if packing is not None:
            kept, position = packing.pack(kept), packing.pack(position)
        self._show_draft(seen, kept, position)
        self._count(batch, requests.slot, outcome.tokens, outcome.commit_len)

    # Both kinds of batches.

    def _show_draft(self, logits_output, window_slot, position) -> None:
        """Store draft latents of rows the target has run (i32 [T] slots; -1 = leave it out)."""
        captures, logits_output.hidden_states = logits_output.hidden_states, None
        self.draft.inject(captures, window_slot, position, self.draft_runner.attn_backend)

    def _own_columns(self, logits: torch.Tensor) -> torch.Tensor:
        """[T, N] -> [T, N / ranks]."""
        return logits[:, self.first_column : self.first_column + self.columns]

    def _count(self, batch, slot, tokens, count) -> None:
        """Penalties count emitted tokens: the first count[r] of each row of i64 [R, V]."""
        if (penalties := self._penalties(batch)) is not None:
            penalties.commit(slot, tokens, count)

    def _penalties(self, batch) -> Penalties | None:
        """None where no request of the batch asks for any."""
        return self.penalties if any_penalised(batch.reqs) else None

    # What SGLang reads from a model worker (all of it: `seams.READ_FROM_WORKER`).

    @property
    def model_runner(self):
        return self.target_runner

    @property
    def spec_v2_attn_backends(self) -> tuple:
        return self.target_runner.attn_backend, self.draft_runner.attn_backend

    def update_weights_from_tensor(self, recv_req) -> tuple[bool, str]:
        return self._target_worker.update_weights_from_tensor(recv_req)

    # What the scheduler asks and tells besides.

    def _collect(self, proposal: Proposal | None, outcome: Accept) -> None:
        if self.settings.samples is not None and proposal is not None and self.draft.rank == 0:
            self.settings.samples.add(proposal.confidence_logit, outcome.accepted)

    def on_verify_complete_cpu(
        self,
        num_correct_drafts_per_req: list[int],
        batch_size: int = 0,
        acceptable_rows: Sequence[int] = (),
        sampled: Sequence[bool] = (),
        turn: Turn = DRAFT,
    ) -> None:
        """Of each request, what `accepted_runs` knows besides: rows that might be accepted, and
        whether it samples. turn: of the step."""
        if turn.measured is not None:
            return  # nobody asked for it
        whole = self.settings.mode is Mode.CAP_ACCEPT  # which runs all of them
        rows = [self.verify_width] * batch_size if whole else acceptable_rows
        self.monitor.record(num_correct_drafts_per_req, rows)
        if self.counters is not None:
            self.counters.record(num_correct_drafts_per_req, rows)
        if turn.counts and self.gate is not None:
            each = zip(sampled, num_correct_drafts_per_req, rows, strict=True)
            self.gate.record([Result(draws, right, run - 1) for draws, right, run in each])

    def set_dspark_forced_budget_frac(self, frac: float | None) -> None:
        """Fix the verify budget to a share of all drafts (SGLang's `set_internal_state`)."""
        self.scheduler.forced_share = frac

    def dump_info_records(self) -> dict[str, Any]:
        """The `dspark` section of `/server_info`."""
        return {
            "block_size": self.gamma,
            "depth": self.depth,
            "forced_drafts": self.forced is not None,
            "bytes_from_other_ranks": dict(transport.received),
            "step_cost": self.cost_source.value,
            "steps_without_draft": 0 if self.gate is None else self.gate.without_draft,
            "online_calibration": self.calibration and self.calibration.report(),
            **self.settings.report(),
            **self.monitor.report(),
        }

    def clear_info_records(self) -> None:
        self.monitor = AcceptanceMonitor(self.depth)
        if self.calibration is not None:
            self.calibration.forget()
        if self.gate is not None:
            self.gate.forget()

    def block_accept_estimate_log_suffix(self) -> str | None:
        return self.monitor.warning
