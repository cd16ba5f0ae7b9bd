"""The draft on the GPU: as on the CPU within rounding, and the same bits from a captured graph."""

import pytest
import torch

from dspark.kernels.common.kv_pages import page_stride
from dspark.kernels.step import BlockRows, Tables, draft_meta
from dspark.target.caches import PAGE_TOKENS, LayerCaches
from dspark.target.config import ModelConfig
from dspark.target.draft import DraftForward, block_ids, inject, run_block
from dspark.target.rope import rope_table
from dspark.target.weights import load_draft, load_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (5, 130, 300)


class Served:
    """The draft in served precision on one device, three requests in slots 1..3."""

    def __init__(self, directory, device):
        self.config = ModelConfig.from_checkpoint(directory)
        self.gamma = self.config.dspark.block_size
        self.weights = load_draft(directory, self.config, device=device)
        target = load_target(directory, self.config, device=device)
        self.embed, self.head = target.embed, target.head
        self.rope = rope_table(self.config.rope_theta, 1024, None).to(device)
        pages = 1 + 2 * len(LENGTHS)
        self.table = torch.zeros(1 + len(LENGTHS), 512, dtype=torch.int32, device=device)
        for i in range(len(LENGTHS)):
            first = (1 + 2 * i) * PAGE_TOKENS
            self.table[i + 1] = torch.arange(first, first + 512, device=device)
        self.window_table = torch.arange(pages * PAGE_TOKENS, device=device)
        self.caches = [
            LayerCaches(
                window=torch.zeros(
                    pages, page_stride(PAGE_TOKENS), dtype=torch.uint8, device=device
                )
            )
            for _ in self.weights.blocks
        ]
        self.slot = torch.arange(1, 1 + len(LENGTHS), device=device)
        self.length = torch.tensor(LENGTHS, device=device)
        self.bonus = torch.tensor([7, 8, 9], device=device)

    def fill(self, captures):
        for slot, length in enumerate(LENGTHS, start=1):
            pos = torch.arange(length, device=self.slot.device)
            window_slot = self.window_table[self.table[slot, :length].long()].to(torch.int32)
            rows = captures[:length].to(self.slot.device, torch.bfloat16)
            inject(rows, window_slot, pos, self.weights, self.config, self.rope, self.caches)

    def block(self):
        ids = block_ids(self.bonus, self.gamma, self.config.dspark.noise_token_id)
        meta = draft_meta(
            BlockRows(self.slot, self.length, torch.zeros_like(self.length), self.gamma),
            Tables(self.table, self.window_table),
            window=self.config.sliding_window,
        )
        return run_block(
            self.embed[ids],
            ids,
            self.weights,
            self.head,
            self.config,
            DraftForward(meta, self.rope, self.caches),
        )


@pytest.fixture(scope="module")
def captures():
    return torch.randn(max(LENGTHS), 3 * 128, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def on_gpu(tiny_directory, captures):
    served = Served(tiny_directory, "cuda")
    served.fill(captures)
    return served


def test_block_matches_the_cpu(tiny_directory, on_gpu, captures):
    on_cpu = Served(tiny_directory, "cpu")
    on_cpu.fill(captures)
    ours, theirs = on_gpu.block().logits.cpu(), on_cpu.block().logits
    error = (ours - theirs).pow(2).mean().sqrt() / theirs.pow(2).mean().sqrt()
    assert float(error) < 2e-2


def test_a_captured_block_replays_the_eager_bits(on_gpu):
    eager = on_gpu.block()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_gpu.block()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = on_gpu.block()
    on_gpu.bonus.copy_(torch.tensor([1, 2, 3]))  # what varies lives in device tensors
    graph.replay()
    changed = captured.hidden.clone()
    on_gpu.bonus.copy_(torch.tensor([7, 8, 9]))
    graph.replay()
    assert torch.equal(captured.hidden, eager.hidden)
    assert not torch.equal(changed, eager.hidden)


def test_a_request_drafts_the_same_bits_in_any_company(on_gpu):
    together = on_gpu.block().hidden.view(len(LENGTHS), on_gpu.gamma, -1)
    for i in range(len(LENGTHS)):
        alone = Served.__new__(Served)
        alone.__dict__.update(on_gpu.__dict__)
        alone.slot, alone.length = on_gpu.slot[i : i + 1], on_gpu.length[i : i + 1]
        alone.bonus = on_gpu.bonus[i : i + 1]
        assert torch.equal(alone.block().hidden, together[i])
