"""Byte layout of the paged KV pools, and reading and writing slots with plain torch.

A packed pool is uint8 `[pages, stride]`. A page of n slots holds n data slots, then n scale slots:

    data slot   448 e4m3 (no rope) + 64 bf16 (rope)       576 bytes
    scale slot  7 UE8M0 exponents, one per 64 dims + 1 pad   8 bytes

A plain pool is float32 `[pages, n * 512]` and stores values as they are; it exists so that a whole
model can be compared with a full-precision one. Slot id = page * n + offset, -1 = no slot.
"""

import torch
from torch import Tensor

from dspark.kernels.common.fp8 import AMAX_FLOOR, FP8_MAX, decode_e4m3
from dspark.kernels.common.norm_rope import ROPE

HEAD = 512
NOPE = 448
GROUP = 64  # dims that share one UE8M0 scale
DATA_BYTES = NOPE + 2 * ROPE
SCALE_BYTES = 8


def page_stride(slots_per_page: int) -> int:
    """Bytes of a packed page: 584 a slot, rounded up to 16 for vector loads."""
    return -(-slots_per_page * (DATA_BYTES + SCALE_BYTES) // 16) * 16


def ue8m0(amax: Tensor) -> Tensor:
    """Exponent byte (i32) of the smallest power of two >= max(amax, 1e-4) / 448.

    Taken from the bits: log2 then ceil misrounds exact powers of two.
    """
    bits = (amax.float().clamp(min=AMAX_FLOOR) / FP8_MAX).view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def store_slots(pool: Tensor, slots_per_page: int, slot: Tensor, kv: Tensor) -> None:
    """Write kv[T, 512] f32 into slots slot[T]; rows with slot -1 are skipped.

    A packed pool quantises the first 448 dims per group of 64 and rounds the rest to bf16.
    """
    keep = slot >= 0
    if not bool(keep.all()):
        slot, kv = slot[keep], kv[keep]
    slot = slot.long()
    if pool.dtype == torch.float32:
        pool.view(-1, HEAD)[slot] = kv
        return
    page, offset = slot // slots_per_page, slot % slots_per_page
    groups = kv[:, :NOPE].unflatten(1, (-1, GROUP))
    exponent = ue8m0(groups.abs().amax(-1))
    inverse = ((254 - exponent) << 23).view(torch.float32)  # 2^-e, so the product is exact
    codes = (groups * inverse[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    data, scales = _packed_views(pool, slots_per_page)
    nope = codes.flatten(1).view(torch.uint8)
    rope = kv[:, NOPE:].to(torch.bfloat16).contiguous().view(torch.uint8)
    data[page, offset] = torch.cat([nope, rope], 1)
    scales[page, offset] = torch.nn.functional.pad(exponent, (0, 1)).to(torch.uint8)


def load_slots(pool: Tensor, slots_per_page: int, slot: Tensor) -> Tensor:
    """f64 [..., 512] values of slots slot[...]; zeros where slot is -1, whatever memory holds."""
    flat = slot.reshape(-1).long()
    safe = flat.clamp(min=0)
    values = torch.empty(flat.shape[0], HEAD, dtype=torch.float64, device=pool.device)
    if pool.dtype == torch.float32:
        values.copy_(pool.view(-1, HEAD)[safe])
    else:
        data, scales = _packed_views(pool, slots_per_page)
        page, offset = safe // slots_per_page, safe % slots_per_page
        raw = data[page, offset]
        exponent = scales[page, offset, : NOPE // GROUP].int()
        scale = (exponent << 23).view(torch.float32)  # byte 0 means 0
        nope = decode_e4m3(raw[:, :NOPE]).view(-1, NOPE // GROUP, GROUP)
        values[:, :NOPE].view(nope.shape).copy_(nope.mul_(scale[..., None]))
        values[:, NOPE:] = raw[:, NOPE:].contiguous().view(torch.bfloat16)
    absent = flat < 0
    if bool(absent.any()):
        values[absent] = 0.0
    return values.view(*slot.shape, HEAD)


def _packed_views(pool: Tensor, slots_per_page: int) -> tuple[Tensor, Tensor]:
    """(data [pages, n, 576], scales [pages, n, 8]) views of a packed pool."""
    pages, stride = pool.shape
    data = pool.as_strided((pages, slots_per_page, DATA_BYTES), (stride, DATA_BYTES, 1))
    scales = pool.as_strided(
        (pages, slots_per_page, SCALE_BYTES),
        (stride, SCALE_BYTES, 1),
        pool.storage_offset() + slots_per_page * DATA_BYTES,
    )
    return data, scales
