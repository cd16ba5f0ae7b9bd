"""Sizes of the compress rings, and the rules that make a verify step safe to take back.

A compressor forms one entry from the raw rows of its last `window` positions. Rows of the running
forward come from the batch, older ones from the ring. A verify step writes `verify_width` rows of
which as few as one may be committed, so the ring must still hold everything the next window needs
after the rejected rows have overwritten its oldest ones.
"""

from dataclasses import dataclass

from dspark.state.errors import StateGeometryError

KINDS = ("c4", "idx", "c128")


@dataclass(frozen=True)
class RingSpec:
    """One kind of compress ring.

    ratio: tokens per compressed entry. window: positions one entry is formed from (2 * ratio for
    C4, which overlaps). ring: rows per owner. width: columns of a row, kv half then score half.
    layers: layers that have this ring.
    """

    ratio: int
    window: int
    ring: int
    width: int
    layers: int

    def max_rows(self) -> int:
        """Most rows one verify may write; entries are formed before the rows are stored.

        The oldest position a later window needs is window - 2 below the step's first row, because
        at least one row commits.
        """
        return self.ring - self.window + 2


@dataclass(frozen=True)
class StateGeometry:
    """Sizes of all state. slots and window_pages count usable ones; index 0 of each is padding.

    page: tokens per page. verify_width: most rows of a request in one forward that may take back
    all of them but one, i.e. depth + 1; 1 without speculation.
    """

    slots: int
    window_pages: int
    page: int
    verify_width: int
    c4: RingSpec
    idx: RingSpec
    c128: RingSpec

    @classmethod
    def for_model(
        cls,
        *,
        slots: int,
        window_pages: int,
        verify_width: int,
        c4_layers: int,
        c128_layers: int,
        head_dim: int = 512,
        index_dim: int = 128,
        page: int = 256,
    ) -> "StateGeometry":
        """The geometry of a DeepSeek-V4 model: the smallest rings that allow speculation or not."""
        speculative = verify_width > 1
        c4_ring, c128_ring = (16, 136) if speculative else (8, 128)
        return cls(
            slots=slots,
            window_pages=window_pages,
            page=page,
            verify_width=verify_width,
            c4=RingSpec(ratio=4, window=8, ring=c4_ring, width=4 * head_dim, layers=c4_layers),
            idx=RingSpec(ratio=4, window=8, ring=c4_ring, width=4 * index_dim, layers=c4_layers),
            c128=RingSpec(
                ratio=128, window=128, ring=c128_ring, width=2 * head_dim, layers=c128_layers
            ),
        )

    def ring(self, kind: str) -> RingSpec:
        """The ring of `kind`, one of "c4", "idx", "c128"."""
        if kind not in KINDS:
            raise KeyError(f"no state of kind {kind!r}; there are {', '.join(KINDS)}")
        return getattr(self, kind)

    def rows(self, kind: str) -> int:
        """Rows of the pool of `kind` per layer, padding owner included."""
        owners = self.slots if kind == "c128" else self.window_pages
        return (owners + 1) * self.ring(kind).ring

    def nbytes(self) -> dict[str, int]:
        """Bytes of each fp32 pool over all layers."""
        return {
            kind: self.ring(kind).layers * self.rows(kind) * self.ring(kind).width * 4
            for kind in KINDS
        }

    def check(self) -> None:
        """Raise StateGeometryError, naming the broken rule, if these sizes could corrupt state."""
        for name in ("slots", "window_pages", "verify_width"):
            _require(getattr(self, name) >= 1, f"{name} must be >= 1, got {getattr(self, name)}")
        for kind in ("c4", "idx"):
            ring = self.ring(kind).ring
            _require(ring >= 8, f"the {kind} ring must be >= 8 rows, got {ring}")
            _require(ring % 4 == 0, f"the {kind} ring must be a multiple of 4 rows, got {ring}")
            _require(
                self.page % ring == 0,
                f"the page must be a multiple of the {kind} ring, got page {self.page} "
                f"and ring {ring}",
            )
        _require(
            self.c4.ring == self.idx.ring,
            f"the c4 and idx rings share their row addresses, got {self.c4.ring} "
            f"and {self.idx.ring} rows",
        )
        _require(self.c128.ring >= 128, f"the c128 ring must be >= 128, got {self.c128.ring}")
        _require(
            self.page % 128 == 0,
            f"the page must be a multiple of 128 tokens, so that a prefix hit never ends inside "
            f"a C128 window, got {self.page}",
        )
        for kind in KINDS:
            spec = self.ring(kind)
            _require(
                spec.width > 0 and spec.width % 2 == 0,
                f"a {kind} row is a kv half and a score half, got width {spec.width}",
            )
            _require(
                self.verify_width <= spec.max_rows(),
                f"verify rows <= ring - window + 2 for {kind}: {self.verify_width} rows need a "
                f"ring of {self.verify_width + spec.window - 2}, got {spec.ring}",
            )


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise StateGeometryError(rule)
