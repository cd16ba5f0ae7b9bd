"""With STATE_DEBUG=1 a graph's replay is observed like an eager forward."""

from types import SimpleNamespace

import pytest
import torch

from dspark.host.backend import DSparkAttentionBackend
from dspark.state import StateGeometry, StateInvariantError, StateLifecycle
from dspark.target.checkpoint import presets
from dspark.target.config import ModelConfig

SIZES = StateGeometry.for_model(
    slots=2, window_pages=4, verify_width=6, c4_layers=1, c128_layers=1, head_dim=2, index_dim=1
)


@pytest.fixture
def backend():
    """The backend of a request in slot 1 whose 512 positions lie in pages 1 and 2."""
    state = StateLifecycle(SIZES, "cpu", debug=True)
    state.slots.assigned([1])
    made = object.__new__(DSparkAttentionBackend)
    table = torch.zeros(SIZES.slots + 1, 512, dtype=torch.int32)
    table[1] = torch.arange(256, 768)
    made.token_to_kv_pool = SimpleNamespace(
        state=state, full_to_swa_index_mapping=torch.arange(1280)
    )
    made.req_to_token_pool = SimpleNamespace(req_to_token=table)
    made.config = ModelConfig.from_hf(presets.tiny())
    made.context_pages = 2
    made.rows_run = torch.full((SIZES.slots + 1,), 6)
    made.rope = made.layer_caches = None  # no layer runs
    return made


def decode(length: int) -> SimpleNamespace:
    """What SGLang hands over before a replay: one request at `length`, one padded row."""
    mode = SimpleNamespace(
        is_target_verify=lambda: False, is_extend=lambda: False, is_idle=lambda: False
    )
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=2,
        req_pool_indices=torch.tensor([1, 0]),
        seq_lens=torch.tensor([length, 1]),
        seq_lens_cpu=None,
    )


def run_layers(backend, length: int) -> None:
    """Store what a decode of position length - 1 stores."""
    position, state = length - 1, backend.token_to_kv_pool.state
    for kind, first in (("c4", 16), ("idx", 16), ("c128", SIZES.c128.ring)):
        ring = SIZES.ring(kind).ring
        state.pools.tensors[kind][:, first + position % ring] = 1.0


def test_replays_of_a_healthy_request_pass(backend):
    for length in range(1, 12):
        backend.init_forward_metadata_out_graph(decode(length))
        run_layers(backend, length)
    backend.token_to_kv_pool.state.check()


def test_a_replay_that_skips_a_position_is_refused(backend):
    for length in (1, 2):
        backend.init_forward_metadata_out_graph(decode(length))
        run_layers(backend, length)
    with pytest.raises(StateInvariantError, match=r"c4 row 2 of page 1 .* holds nothing"):
        backend.init_forward_metadata_out_graph(decode(4))


def test_a_capture_is_not_observed(backend):
    backend.init_forward_metadata_out_graph(decode(4), in_capture=True)
    assert not backend.token_to_kv_pool.state.tags.observing
