"""The whole target on a GPU: Triton kernels under the model code that the CPU tests prove."""

import pytest
import torch

from dspark import embedded
from dspark.bench.local_target import LocalTarget, Rows
from dspark.target.attention import Forward
from dspark.target.checkpoint.make import ACCEPTANCE, make_checkpoint
from dspark.target.checkpoint.presets import PRESETS
from dspark.target.config import ModelConfig
from dspark.target.model import run_layers
from dspark.target.weights import load_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EMBEDDED = embedded.checkpoint()
LENGTHS = (5, 130, 260)  # inside the first window, past one C128 window, past one page


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "checkpoint"
    make_checkpoint(path, PRESETS["tiny"](), alpha=ACCEPTANCE["high"])
    return path


@pytest.fixture(scope="module")
def model_of(directory):
    config = ModelConfig.from_checkpoint(directory)
    weights = {d: load_target(directory, config, device=d) for d in ("cpu", "cuda")}

    def build(device: str, **kwargs) -> LocalTarget:
        return LocalTarget(weights[device], config, max_tokens=512, device=device, **kwargs)

    return build


@pytest.fixture(scope="module")
def tokens():
    generator = torch.Generator().manual_seed(5)
    return torch.randint(2, 510, (300,), generator=generator).tolist()


def prefilled(model: LocalTarget, tokens: list[int]) -> LocalTarget:
    for i, length in enumerate(LENGTHS[: model.geometry.slots]):
        model.forward([Rows(i, 0, tokens[:length])], store_all=False)
    return model


def test_logits_agree_with_the_reference(model_of, tokens):
    logits = {}
    for device in ("cpu", "cuda"):
        model = model_of(device)
        out = model.forward([Rows(0, 0, tokens)], store_all=False)
        logits[device] = model.logits(out.hidden).cpu()
    error = (logits["cuda"] - logits["cpu"]).norm() / logits["cpu"].norm()
    assert error < 2e-2
    best = logits["cpu"].topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.3
    assert logits["cuda"].argmax(1)[clear].equal(logits["cpu"].argmax(1)[clear])
    assert clear.sum() > 200


def test_verify_rows_equal_single_steps_bit_for_bit(model_of, tokens):
    together = prefilled(model_of("cuda", sequences=3, verify_width=6), tokens)
    verify = together.forward([Rows(i, n, tokens[n : n + 6]) for i, n in enumerate(LENGTHS)])
    alone = prefilled(model_of("cuda", sequences=3, verify_width=6), tokens)
    for i, n in enumerate(LENGTHS):
        for j in range(6):
            step = alone.forward([Rows(i, n + j, tokens[n + j : n + j + 1])])
            assert step.hidden[0].equal(verify.hidden[i * 6 + j]), (n, j)


def test_a_captured_decode_step_equals_the_eager_one(model_of, tokens):
    """The metadata is computed inside the graph, from positions that change between replays."""
    eager = prefilled(model_of("cuda", sequences=3), tokens)
    replayed = prefilled(model_of("cuda", sequences=3), tokens)
    ids = torch.zeros(3, dtype=torch.int64, device="cuda")
    prefix = torch.tensor(LENGTHS, device="cuda")
    slots, one = torch.tensor([1, 2, 3], device="cuda"), torch.ones_like(prefix)

    def step():
        from dspark.kernels.step import BatchRows, Bounds, Rings, step_meta

        meta = step_meta(
            BatchRows(slots, prefix, one, 3, 1),
            replayed.tables,
            Bounds(128, 2, 4),
            Rings(replayed.geometry.c4.ring, replayed.geometry.c128.ring),
            store_all=True,
        )
        return run_layers(
            replayed.weights.embed[ids],
            ids,
            replayed.weights,
            replayed.config,
            Forward(meta, True, replayed.rope, replayed.caches),
        ).hidden

    def tokens_at(offset: int) -> list[int]:
        return [tokens[n + offset] for n in LENGTHS]

    with torch.no_grad():
        ids.copy_(torch.tensor(tokens_at(0)))
        step()  # compiles; writes the same rows that the first replay writes again
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden = step()
    for offset in range(6):
        ids.copy_(torch.tensor(tokens_at(offset)))
        prefix.copy_(torch.tensor([n + offset for n in LENGTHS]))
        graph.replay()
        rows = [Rows(i, n + offset, [tokens[n + offset]]) for i, n in enumerate(LENGTHS)]
        assert hidden.equal(eager.forward(rows).hidden), offset


@pytest.mark.parametrize("width", [1, 6])
def test_sixteen_requests_have_the_bits_of_each_alone(width):
    """Trained weights, prompts of many lengths, tall and low tiles: every row, many steps."""
    config = ModelConfig.from_checkpoint(EMBEDDED)
    weights = load_target(EMBEDDED, config, device="cuda")
    generator = torch.Generator().manual_seed(6)
    texts = torch.randint(2, config.vocab_size, (16, 400), generator=generator).tolist()
    lengths = [20 + 11 * i for i in range(16)]

    def build() -> LocalTarget:
        return LocalTarget(
            weights, config, max_tokens=512, sequences=16, verify_width=6, device="cuda"
        )

    together, alone = build(), build()
    rows = [Rows(i, 0, texts[i][:n]) for i, n in enumerate(lengths)]
    for step in range(11):
        both = together.forward(rows, store_all=step > 0).hidden
        each = [alone.forward([row], store_all=step > 0).hidden for row in rows]
        assert both.equal(torch.cat(each)), f"step {step}"
        ends = [row.prefix + len(row.tokens) for row in rows]
        rows = [Rows(i, n, texts[i][n : n + width]) for i, n in enumerate(ends)]
