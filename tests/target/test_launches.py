"""The launch budget of a decode step: no layer kind may gain a kernel or a hidden copy.

Runs the CUDA code path of every op on CPU tensors with the kernels themselves left out, so only
what is launched is known, not what it computes.
"""

from collections import Counter

import pytest
import torch
from no_sync import NoSync
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from dspark.bench.decode_step import FLASH_LAYERS, with_layers
from dspark.bench.local_target import LocalTarget, Rows
from dspark.kernels.common import dispatch
from dspark.kernels.step import BlockRows, draft_meta
from dspark.target.checkpoint import presets
from dspark.target.config import ModelConfig
from dspark.target.draft import DraftForward, run_block
from dspark.target.weights import load_draft, load_target

SITES = Counter(_project=2, _mix=2)
EXPERTS = Counter(_linear=3, _route=1, _gate_up_of_pair=1, _down_of_row=1)
ATTENTION = Counter(_linear=4, _rms_norm=1, _q_kv_prepare=1, _decode=1, _combine=1)
LAYER = {
    0: SITES + EXPERTS + ATTENTION,
    4: SITES + EXPERTS + ATTENTION + Counter(_linear=1, _c4_step=1, _query=1, _logits=1, _topk=1),
    128: SITES + EXPERTS + ATTENTION + Counter(_linear=1, _form_c128=1, _finish_c128=1),
}


class Copies(TorchDispatchMode):
    """Torch ops that move data: each would be a launch too."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("clone", "copy_", "_to_copy", "cat", "index"):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def tiny(tiny_directory):
    config = ModelConfig.from_hf(presets.tiny())
    return load_target(tiny_directory, config), config


def leave_kernels_out(monkeypatch) -> Counter[str]:
    """Count launches by kernel instead; nothing is computed."""
    launches: Counter[str] = Counter()

    def run(self, *args, **kwargs):
        launches[self.fn.__name__] += 1

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(dispatch, "INTERPRETED", True)  # `use_triton` holds on CPU tensors
    return launches


def step(tiny, ratios, monkeypatch) -> tuple[Counter, Counter]:
    """Kernels and copies of one verify step of six rows through layers of these ratios."""
    weights, config = tiny
    layers = [config.compress_ratios.index(ratio) for ratio in ratios]
    model = LocalTarget(*with_layers(weights, config, layers), max_tokens=2304, verify_width=6)
    launches = leave_kernels_out(monkeypatch)
    with torch.no_grad(), Copies() as copies:
        model.logits(model.forward([Rows(0, 2048, [5] * 6)]).hidden)
    return launches, copies.counts


@pytest.mark.parametrize("ratio", FLASH_LAYERS)
def test_launches_of_a_layer(tiny, ratio, monkeypatch):
    base, base_copies = step(tiny, [0], monkeypatch)
    more, more_copies = step(tiny, [0, ratio], monkeypatch)
    more.subtract(base)
    assert +more == LAYER[ratio]
    assert more_copies == base_copies, "a layer copies a tensor"


def test_launches_of_a_flash_step(tiny, monkeypatch):
    """At most 1,000 Triton launches in 43 layers, metadata and head."""
    outside = step(tiny, [0], monkeypatch)[0].total() - LAYER[0].total()
    layers = sum(count * LAYER[ratio].total() for ratio, count in FLASH_LAYERS.items())
    assert layers + outside == 945


REQUESTS = 48  # as many as a server runs by default; their rows are more than one launch takes


def test_verify_of_many_requests_never_waits_for_the_device(tiny, monkeypatch):
    """It is captured in a CUDA graph, in which waiting is an error."""
    model = LocalTarget(*tiny, max_tokens=512, sequences=REQUESTS, verify_width=6)
    launches = leave_kernels_out(monkeypatch)
    with torch.no_grad(), NoSync():
        model.forward([Rows(i, 200, [5] * 6) for i in range(REQUESTS)])
    assert launches["_decode"] > 0
    assert launches["_prefill"] == 0


def test_drafts_of_many_requests_never_wait_for_the_device(tiny, tiny_directory, monkeypatch):
    weights, config = tiny
    draft = load_draft(tiny_directory, config)
    model = LocalTarget(weights, config, max_tokens=512, sequences=REQUESTS)
    slot, gamma = torch.arange(1, 1 + REQUESTS), config.dspark.block_size
    launches = leave_kernels_out(monkeypatch)
    ids = torch.full((REQUESTS * gamma,), 5)
    with torch.no_grad(), NoSync():
        meta = draft_meta(
            BlockRows(slot, torch.full_like(slot, 200), torch.zeros_like(slot), gamma),
            model.tables,
            window=config.sliding_window,
        )
        run_block(
            weights.embed[ids],
            ids,
            draft,
            weights.head,
            config,
            DraftForward(meta, model.rope.plain, model.caches[: config.dspark.stages]),
        )
    assert launches["_decode"] > 0
    assert launches["_prefill"] == 0
