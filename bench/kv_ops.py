"""Time the KV, compressor, indexer and attention kernels inside CUDA graphs.

    python -m dspark.bench.kv_ops [--rows 1 6 8 48] [--context 8192] [--only decode] [--sweep]

Prints microseconds a launch (median of graph replays, inputs rotated through copies larger than
the L2 cache) next to the time the bytes alone would take. `--sweep` tries other launch
configurations of the sparse decode and index kernels; the one in use is starred.
"""

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from dspark.bench.graph_time import copy_bandwidth, graph_time
from dspark.bench.op_case import OpCase, copies_on
from dspark.bench.tune.attention_inputs import SLOT_BYTES, random_pool
from dspark.bench.tune.op import seeded
from dspark.kernels.attention import SlotList, mla_sparse
from dspark.kernels.attention import kernel as attention_kernel
from dspark.kernels.common.index_pages import KEYS, PACKED_STRIDE, WIDTH
from dspark.kernels.common.kv_pages import page_stride
from dspark.kernels.common.launch_table import LaunchConfig
from dspark.kernels.compress import CompressRows, Stream, c4_compress_pair, c128_compress
from dspark.kernels.indexer import index_logits, index_q, index_select
from dspark.kernels.indexer import kernel as indexer_kernel
from dspark.kernels.qkv import q_kv_prepare
from dspark.target.caches import C4_PER_PAGE, C128_PER_PAGE, PAGE_TOKENS

HEADS, INDEX_HEADS, TOPK, WINDOW, VERIFY = 8, 64, 512, 128, 6
RING_C4, RING_C128 = 16, 136
# Slots of a pool: beyond any L2 on a GPU, a few for a smoke test on a CPU.
POOL_SLOTS = {"cuda": 1 << 18, "cpu": 1 << 10}
CUDA = torch.device("cuda")


def time_of(case: OpCase) -> float:
    """Median microseconds of one launch, going round all copies of the inputs."""
    return graph_time(case.launch, copies=len(case.inputs))


class Verify(NamedTuple):
    """Rows after `context` tokens: six of each request, or one of each where six do not divide."""

    requests: int
    owner: torch.Tensor  # i64 [T] request of the row
    in_req: torch.Tensor  # i64 [T]
    pos: torch.Tensor  # i64 [T]

    @classmethod
    def of(cls, rows: int, context: int, device: torch.device) -> "Verify":
        each = VERIFY if rows % VERIFY == 0 else 1
        row = torch.arange(rows, device=device)
        in_req = row % each
        return cls(rows // each, row // each, in_req, context - VERIFY - 1 + in_req)


def attention_cases(rows: int, context: int, device: torch.device = CUDA) -> Iterator[OpCase]:
    """The lists of all copies point into one pool that is larger than the cache."""
    random = seeded(device, rows)
    slots = POOL_SLOTS[device.type]

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=random)

    def chosen(width: int) -> torch.Tensor:
        listed = torch.randint(0, slots, (rows, width), device=device, generator=random)
        return listed.int().sort(1).values

    def length(width: int) -> torch.Tensor:
        return torch.full((rows,), width, dtype=torch.int32, device=device)

    window_pool = random_pool(slots // PAGE_TOKENS, PAGE_TOKENS, random)
    shared = {
        "sink": normal(HEADS),
        "scale": 512**-0.5,
        "cos_sin": normal(context, 64),
        "pos": torch.randint(0, context, (rows,), device=device, generator=random),
    }
    for name, width, entries, per_page in [
        ("window", WINDOW, 0, 0),
        ("draft", WINDOW + 5, 0, 0),
        ("c128", WINDOW, context // 128, C128_PER_PAGE),
        ("c4", WINDOW, TOPK, C4_PER_PAGE),
    ]:
        moved = rows * (width + entries) * SLOT_BYTES
        pool = random_pool(slots // per_page, per_page, random) if entries else None
        inputs = [
            {
                **shared,
                "q": normal(rows, HEADS, 512).bfloat16(),
                "window": SlotList(window_pool, PAGE_TOKENS, chosen(width), length(width)),
                "compressed": pool
                if pool is None
                else SlotList(pool, per_page, chosen(entries), length(entries)),
            }
            for _ in range(copies_on(device, moved, 512))
        ]
        yield OpCase(f"attention {name}", mla_sparse, inputs, moved)


def prepare_cases(rows: int, context: int, device: torch.device = CUDA) -> Iterator[OpCase]:
    """Query and window latent of one layer."""
    random = seeded(device, rows)
    shared = {
        "norm_w": torch.ones(512, device=device).bfloat16(),
        "cos_sin": torch.randn(context, 64, device=device, generator=random),
        "pos": Verify.of(rows, context, device).pos,
        "slot": torch.arange(rows, device=device).int(),
        "slots_per_page": PAGE_TOKENS,
    }
    stride = page_stride(PAGE_TOKENS)
    moved = 2 * rows * HEADS * 1024 + rows * (1024 + SLOT_BYTES)
    inputs = []
    for _ in range(copies_on(device, moved)):
        q = torch.randn(rows, HEADS, 512, device=device, generator=random).bfloat16()
        kv = torch.randn(rows, 512, device=device, generator=random).bfloat16()
        pool = torch.zeros(1, stride, dtype=torch.uint8, device=device)
        inputs.append({**shared, "q": q, "kv": kv, "pool": pool})
    yield OpCase("q_kv_prepare", q_kv_prepare, inputs, moved)


def compressor(rows: int, requests: int, ratio: int, width: int, random: torch.Generator) -> Stream:
    """Raw rows, bias, ring, norm weight and pool of one compressor (C128 has the same parts)."""
    device = random.device
    halves, ring = (2, RING_C4) if ratio == 4 else (1, RING_C128)
    per_page = C4_PER_PAGE if ratio == 4 else C128_PER_PAGE
    stride = PACKED_STRIDE if width == WIDTH else page_stride(per_page)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=random)

    return Stream(
        normal(rows, 2 * halves * width),
        normal(halves * ratio, width),
        normal(requests * ring, 2 * halves * width),
        torch.ones(width, device=device).bfloat16(),
        torch.zeros(-(-rows // per_page), stride, dtype=torch.uint8, device=device),
    )


def compress_cases(rows: int, context: int, device: torch.device = CUDA) -> Iterator[OpCase]:
    """No window closes, or one closes at the last row of every request."""
    random = seeded(device, rows)
    table = torch.randn(context, 64, device=device, generator=random)
    requests, owner, in_req, pos = Verify.of(rows, context, device)
    last = in_req == in_req.max()

    for closing in (False, True):
        entry = torch.where(last & closing, torch.arange(rows, device=device), -1).int()
        note = " closing" if closing else ""
        for name, ratio, widths in [("c4 pair", 4, (512, 128)), ("c128", 128, (512,))]:
            ring = RING_C4 if ratio == 4 else RING_C128
            base = owner * ring
            if ratio == 4:
                group = [base + (pos - back) % ring for back in (7, 3)]
            else:
                group = [base, torch.full_like(base, ring)]
            shared = {
                "rows": CompressRows(
                    torch.stack([pos, *group, in_req], 1).int(), (base + pos % ring).int(), entry
                ),
                "cos_sin": table,
            }

            def streams(ratio=ratio, widths=widths) -> list[Stream]:
                return [compressor(rows, requests, ratio, width, random) for width in widths]

            moved = sum(
                2 * part.s.nbytes + closing * requests * part.ape.nbytes * 2 for part in streams()
            )
            inputs: list[dict[str, Any]] = []
            for _ in range(copies_on(device, moved)):
                first, *second = streams()
                if second:
                    pair = {"main": first, "index": second[0], "running": True}
                    inputs.append({**shared, **pair})
                else:
                    inputs.append({**shared, "stream": first, "entries_per_page": C128_PER_PAGE})
            function = c4_compress_pair if ratio == 4 else c128_compress
            yield OpCase(f"compress {name}{note}", function, inputs, moved)


def index_cases(rows: int, context: int, device: torch.device = CUDA) -> Iterator[OpCase]:
    """The indexer of one layer; its requests have pages of their own, in no order."""
    random = seeded(device, rows)
    requests, owner, _, pos = Verify.of(rows, context, device)
    table = torch.randn(context, 64, device=device, generator=random)
    queries = []
    moved = rows * INDEX_HEADS * (3 * WIDTH + 6)
    for _ in range(copies_on(device, moved)):
        q = torch.randn(rows, INDEX_HEADS, WIDTH, device=device, generator=random).bfloat16()
        w = torch.randn(rows, INDEX_HEADS, device=device, generator=random).bfloat16()
        queries.append({"q": q, "w": w, "cos_sin": table, "pos": pos})
    yield OpCase("index_q", index_q, queries, moved)

    entries = context // 4
    pages = requests * -(-entries // KEYS)
    moved = requests * entries * (WIDTH + 4) + rows * entries * 8
    shared = {
        "query": index_q(**queries[0]),
        "row_req": owner.int(),
        "c4_len": ((pos + 1) // 4).int(),
        "c_max": entries,
    }
    inputs = []
    for _ in range(copies_on(device, moved, 512)):
        codes = torch.randn(pages, KEYS * WIDTH, device=device, generator=random)
        pool = torch.zeros(pages, PACKED_STRIDE, dtype=torch.uint8, device=device)
        pool[:, : KEYS * WIDTH] = codes.to(torch.float8_e4m3fn).view(torch.uint8)
        pool.view(torch.float32)[:, KEYS * WIDTH // 4 :] = 1.0
        order = torch.randperm(pages, device=device, generator=random)
        inputs.append({**shared, "pool": pool, "page_table": order.int().view(requests, -1)})
    yield OpCase("index_logits", index_logits, inputs, moved)
    chosen = [{**call, "k": TOPK} for call in inputs]
    yield OpCase("index_select", index_select, chosen, moved)


MAKERS = (attention_cases, prepare_cases, compress_cases, index_cases)


# Launch configurations to try, by (kernel, op). A changed CH or GROUP changes the sums of the op;
# everything else leaves every bit alone.
SWEEPS: dict[str, tuple[Any, str, list[LaunchConfig]]] = {
    "attention decode": (
        attention_kernel,
        "decode",
        [
            LaunchConfig(warps, 1, {"CH": split, "BH": 16})
            for split in (32, 64, 128)
            for warps in (4, 8)
        ],
    ),
    "attention combine": (
        attention_kernel,
        "combine",
        [
            LaunchConfig(warps, 1, {"GROUP": group, "BD": width})
            for group in (4, 8, 16)
            for width, warps in [
                (64, 1),
                (128, 1),
                (128, 2),
                (128, 4),
                (256, 4),
                (512, 4),
                (512, 8),
            ]
        ],
    ),
    "index logits": (
        indexer_kernel,
        "logits",
        [LaunchConfig(warps, stages, {}) for warps in (2, 4, 8) for stages in (1, 2, 3, 4)],
    ),
    "index topk": (
        indexer_kernel,
        "topk",
        [
            LaunchConfig(warps, 1, {"BLOCK": block})
            for block in (1024, 2048, 4096, 8192)
            for warps in (4, 8, 16)
        ],
    ),
}
SWEPT_CASES = {"attention": ("attention window", "attention c4"), "index": ("index_select",)}


def sweep(rows: int, context: int) -> None:
    """Times of every configuration in SWEEPS, one line each; the stock one is starred."""
    cases = {case.name: case for make in MAKERS for case in make(rows, context)}
    for title, (kernel, op, configs) in SWEEPS.items():
        stock = kernel.LAUNCH[op]
        for config in configs:
            kernel.LAUNCH[op] = config
            times = [
                f"{name} {time_of(cases[name]):6.1f} us" for name in SWEPT_CASES[title.split()[0]]
            ]
            mark = "*" if config == stock else " "
            numbers = {**config.constexprs, "warps": config.num_warps, "stages": config.num_stages}
            shown = " ".join(f"{key}={value}" for key, value in numbers.items())
            print(f"{mark} T={rows:3} {title:18} {shown:28} {'  '.join(times)}", flush=True)
        kernel.LAUNCH[op] = stock


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dspark.bench.kv_ops", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 8, 48])
    parser.add_argument("--context", type=int, default=8192, help="tokens before the rows")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="also other launch configurations")
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: {bandwidth / 1e12:.2f} TB/s copied")
    for rows in options.rows:
        for make in MAKERS:
            for case in make(rows, options.context):
                if options.only in case.name:
                    floor = case.moved / bandwidth * 1e6
                    print(f"T={rows:3} {case.name:24} {time_of(case):8.1f} us  floor {floor:6.2f}")
        if options.sweep:
            sweep(rows, options.context)


if __name__ == "__main__":
    main()
