"""Checks everything of SGLang that this package replaces, registers, subclasses or calls.

Each file of `seam_lists` names the seams of one topic.

SGLang 0.5.17 keeps most of these private, so the version is pinned and each name is checked with
the parameters we rely on before the server starts (`verify`). SGLang only logs a hook that failed
to apply; `require_active` is therefore asked again inside the worker process, where the hooks do
their work, and stops it when one of them is not in place.
"""

import importlib.metadata
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping

from dspark.host.seam import Seam, Use
from dspark.host.seam_lists import (
    common,
    control,
    cpu,
    memory,
    model,
    rank,
    request,
    speculation,
    step,
)

SGLANG_VERSION = "0.5.17"
EXTERNAL_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
MODEL_PACKAGE = "dspark.host.models"
ATTENTION_BACKEND = "dsv4"  # SGLang forces this name for the architecture; we take it over


SEAMS = (
    *request.SEAMS,
    *control.SEAMS,
    *rank.SEAMS,
    *memory.SEAMS,
    *model.SEAMS,
    *speculation.SEAMS,
    *step.SEAMS,
    *cpu.SEAMS,
    *common.SEAMS,
)


# What SGLang reads from the speculative worker, its model worker where there is one. All of it
# is in our class or its base; a test compares with SGLang's sources.
READ_FROM_WORKER = frozenset(
    {
        "alloc_memory_pool",
        "block_accept_estimate_log_suffix",
        "clear_cache_pool",
        "clear_info_records",
        "draft_worker",
        "dump_info_records",
        "forward_batch_generation",
        "graph_memory_usage",
        "graph_time_usage",
        "init_attention_backends",
        "init_cuda_graphs",
        "model_runner",
        "note_request_finished",
        "on_verify_complete_cpu",
        "set_dspark_forced_budget_frac",
        "spec_v2_attn_backends",
        "target_worker",
        "update_weights_from_disk",
        "update_weights_from_ipc",
        "update_weights_from_tensor",
        "war_fastpath_runner",
        "weight_load_time",
    }
)


def find_version_fault() -> str | None:
    """One sentence if SGLang is absent or not the version this package was written against."""
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        found = "no SGLang at all"
    if found == SGLANG_VERSION:
        return None
    return (
        f"this plugin works with SGLang {SGLANG_VERSION} only, but found {found}; "
        f"install it with: pip install sglang=={SGLANG_VERSION}"
    )


def find_fault(seam: Seam) -> str | None:
    """One line naming what is gone or changed; None if the seam is as we rely on it."""
    try:
        found = pkgutil.resolve_name(seam.path)
    except Exception as error:  # an import can fail in any way
        return f"{seam.path} ({seam.use.value}) cannot be found: {error}"
    if not seam.parameters:
        return None
    names = tuple(inspect.signature(found).parameters)
    if seam.use is Use.HOOK:
        if names == seam.parameters:
            return None
        return f"{seam.path} takes {names}, expected {seam.parameters}"
    lacking = [p for p in seam.parameters if p not in names]
    if lacking:
        return f"{seam.path} ({seam.use.value}) lacks the parameters {', '.join(lacking)}"
    return None


def verify(seams: Iterable[Seam] = SEAMS) -> list[str]:
    """One line per seam that is not as expected; call it before any hook is applied."""
    return [fault for seam in seams if (fault := find_fault(seam))]


def is_wrapped_by(function: Callable, hook: Callable) -> bool:
    """Whether `hook` is one of the layers SGLang's registry put around `function`."""
    layer: Callable | None = function
    while layer is not None:
        cells = getattr(layer, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        layer = getattr(layer, "__wrapped__", None)
    return False


class HookLost(RuntimeError):
    """A hook or registration is not in place in this process, so stock code would run."""


def require_active(hooks: Iterable[tuple[str, Callable]], backend_factory: Callable) -> None:
    """Stop the worker unless every hook, the attention backend and the model class are ours.

    Args:
        hooks: (target below `sglang.srt.`, our function) for each hook registered.
        backend_factory: what we put into SGLang's attention registry.

    Raises:
        HookLost: naming the first thing that is stock.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.models.registry import ModelRegistry

    for target, hook in hooks:
        if not is_wrapped_by(pkgutil.resolve_name(f"sglang.srt.{target}"), hook):
            raise HookLost(
                f"SGLang did not apply the hook on {target}; see the log above for why, "
                "and stop other plugins from replacing it."
            )
    if ATTENTION_BACKENDS.get(ATTENTION_BACKEND) is not backend_factory:
        raise HookLost(
            f"another plugin took over SGLang's attention backend {ATTENTION_BACKEND!r}."
        )
    model, _ = ModelRegistry.resolve_model_cls(["DeepseekV4ForCausalLM"])
    if not model.__module__.startswith(f"{MODEL_PACKAGE}."):
        raise HookLost(
            f"SGLang resolves DeepseekV4ForCausalLM to {model.__module__}, not to "
            f"{MODEL_PACKAGE}; see the import error in the log above."
        )


_registered = False


def note_registered() -> None:
    """SGLang has called the plugin's entry point in this process, and it came to its end."""
    global _registered
    _registered = True


def registered() -> bool:
    return _registered


_expected: tuple[Mapping[str, Callable], Callable] | None = None
_not_set_up = "this plugin was not set up in the worker process; the log above says why."


def expect_in_worker(hooks: Mapping[str, Callable], backend_factory: Callable) -> None:
    """Remember what `check_worker` shall find; called when everything has been registered."""
    global _expected
    _expected = (hooks, backend_factory)


def refuse_in_worker(sentence: str) -> None:
    """Have `check_worker` stop the process with this sentence."""
    global _not_set_up
    _not_set_up = sentence


def check_worker() -> None:
    """Raise HookLost in a worker process where stock code would run instead of ours."""
    if _expected is None:
        raise HookLost(_not_set_up)
    hooks, backend_factory = _expected
    require_active(hooks.items(), backend_factory)


def name_models() -> None:
    """Have this process and its children load our model classes, unless the user named others."""
    os.environ.setdefault(EXTERNAL_MODELS, MODEL_PACKAGE)


def register_models() -> None:
    """Put our model classes before SGLang's own, beside any package the user already named."""
    if os.environ[EXTERNAL_MODELS] != MODEL_PACKAGE:
        from sglang.srt.models.registry import ModelRegistry

        ModelRegistry.register(MODEL_PACKAGE, overwrite=True)
