"""Time the KV, compressor, indexer and attention kernels inside CUDA graphs.

    python -m dspark.bench.kv_ops [--rows 1 6 8 48] [--context 8192] [--only decode] [--sweep]

Prints microseconds a launch (median of graph replays, inputs rotated through copies larger than
the L2 cache) next to the time the bytes alone would take. `--sweep` tries other launch
configurations of the sparse decode and index kernels; the one in use is starred.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from dspark.bench.graph_time import Launch, graph_time
from dspark.kernels.attention import kernel as attention_kernel
from dspark.kernels.attention import mla_sparse
from dspark.kernels.compress import C4Stream, c4_compress_pair, c128_compress
from dspark.kernels.indexer import index_q, index_select
from dspark.kernels.indexer import kernel as indexer_kernel
from dspark.kernels.indexer.pages import KEYS, PACKED_STRIDE, WIDTH
from dspark.kernels.plan import LaunchConfig
from dspark.kernels.qkv import page_stride, q_kv_prepare

COPIES = 8  # of every input, so that a replay does not find it in the cache
HEADS, INDEX_HEADS, TOPK, WINDOW, VERIFY = 8, 64, 512, 128, 6
Case = tuple[str, int, Launch]  # name, bytes moved, launch on copy i


def time_of(launch: Launch) -> float:
    """Median microseconds of one launch, going round all copies of the inputs."""
    return graph_time(launch, copies=COPIES, chain=COPIES)


def random_pool(pages: int, stride: int) -> torch.Tensor:
    """Bytes that decode to finite values of all kinds."""
    return torch.randint(0, 120, (pages, stride), dtype=torch.uint8, device="cuda")


def random_slots(rows: int, width: int, slots: int) -> torch.Tensor:
    return torch.randint(0, slots, (rows, width), device="cuda").int().sort(1).values


def attention_cases(rows: int, context: int) -> Iterator[Case]:
    window = [random_pool(64, page_stride(256)) for _ in range(COPIES)]
    table = torch.randn(context, 64, device="cuda")
    pos = torch.randint(0, context, (rows,), device="cuda")
    q = [torch.randn(rows, HEADS, 512, device="cuda").bfloat16() for _ in range(COPIES)]
    sink = torch.randn(HEADS, device="cuda")
    for name, width, entries, per_page in [
        ("window", WINDOW, 0, 0),
        ("draft", WINDOW + 5, 0, 0),
        ("c128", WINDOW, context // 128, 2),
        ("c4", WINDOW, TOPK, 64),
    ]:
        idx = [random_slots(rows, width, 64 * 256) for _ in range(COPIES)]
        length = torch.full((rows,), width, device="cuda").int()
        extra: list[Any] = [(None, 0, None, None)] * COPIES
        if entries:
            pools = [random_pool(256, page_stride(per_page)) for _ in range(COPIES)]
            x_len = torch.full((rows,), entries, device="cuda").int()
            extra = [
                (pool, per_page, random_slots(rows, entries, 256 * per_page), x_len)
                for pool in pools
            ]

        def launch(i: int, idx=idx, length=length, extra=extra) -> object:
            x_pool, x_n, x_idx, x_len = extra[i]
            return mla_sparse(
                q[i], window[i], 256, idx[i], length, x_pool, x_n, x_idx, x_len,
                sink, 512**-0.5, table, pos,
            )  # fmt: skip

        yield f"attention {name}", rows * (width + entries) * 584, launch


def compress_stream(rows: int, ratio: int, width: int) -> C4Stream:
    """Raw rows, bias, ring, norm weight and pool of one compressor (C128 has the same parts)."""
    halves = 2 if ratio == 4 else 1
    return C4Stream(
        torch.randn(rows, 2 * halves * width, device="cuda"),
        torch.randn(halves * ratio, width, device="cuda"),
        torch.randn(rows * 256, 2 * halves * width, device="cuda"),
        torch.ones(width, device="cuda").bfloat16(),
        random_pool(256, PACKED_STRIDE if width == 128 else page_stride(64)),
    )


def other_cases(rows: int, context: int) -> Iterator[Case]:
    table = torch.randn(context, 64, device="cuda")
    requests = -(-rows // VERIFY)
    in_req = torch.arange(rows, device="cuda") % VERIFY if rows % VERIFY == 0 else None
    if in_req is None:  # decode: one row a request
        requests, in_req = rows, torch.zeros(rows, dtype=torch.int64, device="cuda")
    owner = in_req.eq(0).cumsum(0) - 1
    pos = context - VERIFY - 1 + in_req

    q = torch.randn(rows, HEADS, 512, device="cuda").bfloat16()
    kv, w = q[:, 0].contiguous(), torch.ones(512, device="cuda").bfloat16()
    pool = random_pool(64, page_stride(256))
    loc = torch.arange(rows, device="cuda").int()
    yield (
        "q_kv_prepare",
        2 * q.nbytes + rows * (1024 + 584),
        lambda i: q_kv_prepare(q, kv, w, table, pos, loc, pool, 256),
    )

    last = in_req == in_req.max()
    for closing in (False, True):  # no window closes, or one closes in every request
        out_loc = torch.where(last & closing, torch.arange(rows, device="cuda"), -1).int()
        note = " closing" if closing else ""
        for name, ratio, widths in [("c4 pair", 4, (512, 128)), ("c128", 128, (512,))]:
            base = owner * 256
            group = [base + (pos - back) % 16 for back in (7, 3)]
            if ratio == 128:
                group = [base, torch.full_like(base, 256)]
            plan = torch.stack([pos, *group, in_req], 1).int()
            store = (base + pos % 256).int()
            streams = [compress_stream(rows, ratio, width) for width in widths]

            def launch(i: int, streams=streams, plan=plan, store=store, loc=out_loc) -> None:
                if len(streams) == 2:
                    main, index = streams
                    c4_compress_pair(main, index, plan, store, table, loc, few_rows=True)
                else:
                    s, ape, ring, norm, target = streams[0]
                    c128_compress(s, ape, ring, plan, store, norm, table, loc, target, 64)

            moved = sum(
                2 * part.s.nbytes + closing * requests * part.ape.nbytes * 2 for part in streams
            )
            yield f"compress {name}{note}", moved, launch

    iq = torch.randn(rows, INDEX_HEADS, 128, device="cuda").bfloat16()
    iw = torch.randn(rows, INDEX_HEADS, device="cuda").bfloat16()
    yield "index_q", iq.nbytes * 3 // 2, lambda i: index_q(iq, iw, table, pos)

    entries = context // 4
    pages = -(-entries // 64)
    keys = [random_pool(requests * pages, PACKED_STRIDE) for _ in range(COPIES)]
    for pool_copy in keys:  # scores of a usual size: the selection stops where they differ
        pool_copy.view(torch.float32)[:, KEYS * WIDTH // 4 :] = 1.0
    order = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
    query = index_q(iq, iw, table, pos)
    lengths = ((pos + 1) // 4).int()

    def select(i: int) -> object:
        return index_select(query, keys[i], order, owner.int(), lengths, entries, TOPK)

    yield "index_select", requests * entries * 132 + rows * entries * 8, select


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
    cases = {
        name: launch
        for make in (attention_cases, other_cases)
        for name, _, launch in make(rows, context)
    }
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
    copy = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
    bandwidth = 2 * copy.nbytes / (time_of(lambda i: copy.clone()) * 1e-6)
    print(f"{torch.cuda.get_device_name()}: {bandwidth / 1e12:.2f} TB/s copied")
    for rows in options.rows:
        for cases in (attention_cases, other_cases):
            for name, moved, launch in cases(rows, options.context):
                if options.only in name:
                    floor = moved / bandwidth * 1e6
                    print(f"T={rows:3} {name:24} {time_of(launch):8.1f} us  floor {floor:6.2f}")
        if options.sweep:
            sweep(rows, options.context)


if __name__ == "__main__":
    main()
