"""Run sm_89 code generation on a Hopper GPU, for tests: `sm89_on_sm90.install()`.

Triton then lowers every kernel as for Ada (mma.sync and cp.async, no wgmma, no TMA) and writes
`.target sm_89` PTX, which ptxas assembles for the device at hand. What such a run proves is that
the Ada instruction stream is right, deterministic and batch-invariant. It says nothing about the
speed of an Ada card, its 72 MB L2 or its PCIe collectives.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton import knobs

from dspark.kernels.tooling.aot import MAX_SHARED_BYTES

CAPABILITY = 89


def install(cache_dir: str | Path | None = None) -> None:
    """Switch this process to sm_89 code generation; call it before the first kernel launch.

    cache_dir: where compiled kernels go, by default a new folder. It must be private to this mode,
    because Triton's cache key does not see the change.
    """
    knobs.cache.dir = str(cache_dir or tempfile.mkdtemp(prefix="sm89-"))
    knobs.runtime.override_arch = f"sm{CAPABILITY}"
    knobs.runtime.add_stages_inspection_hook = _emit_sm89


def _emit_sm89(
    backend: Any, stages: dict[str, Callable], options: Any, language: Any, capability: int
) -> None:
    def make_ptx(source: Any, metadata: dict[str, Any]) -> str:
        # A Hopper block may have 227 KB, so the device would not refuse what Ada cannot launch.
        if metadata["shared"] > MAX_SHARED_BYTES:
            raise RuntimeError(
                f"kernel needs {metadata['shared']} B of shared memory, "
                f"sm_89 has {MAX_SHARED_BYTES}"
            )
        return backend.make_ptx(source, metadata, options, CAPABILITY)

    stages["ptx"] = make_ptx
