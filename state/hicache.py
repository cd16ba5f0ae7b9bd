"""Host loads that respect the life cycle: ordered, complete, and all or nothing.

The attach point is SGLang's `HybridCacheController`:

* A load writes pages from a copy engine. It waits for the fence, i.e. for the last launch of the
  page's old owner and for the clear behind it.
* A window page is worth nothing without the C4 rows that live and die with it. A transfer that
  has the page but not both kinds of rows is a miss.
* A load that fails leaves nothing behind: its pages go back through the wrapped allocator, which
  queues them for clearing.
"""

from typing import Any

from dspark.state.errors import HostLoadError, StateError
from dspark.state.pages import PageClearer

WINDOW = "swa"
ROWS = ("deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state")  # SGLang's names for our rings


def attach(pages: PageClearer, controller: Any) -> None:
    """Wrap `write`, `load` and `start_loading` of a HybridCacheController.

    Raises StateError if the controller's pools cannot keep the rules: a window pool whose pages
    are not released through the attached allocator, or that is registered without its rows.
    """
    _check_pools(pages, controller.mem_pool_host.entry_map)
    write, load, start = controller.write, controller.load, controller.start_loading

    def write_bundle(device_indices, priority=None, node_id=-1, extra_pools=None):
        if not is_bundle(extra_pools):
            return None
        return write(device_indices, priority, node_id, extra_pools)

    def load_bundle(host_indices, priority=None, node_id=-1, extra_pools=None):
        if not is_bundle(extra_pools):
            return None
        return load(host_indices, priority, node_id, extra_pools)

    def start_behind_fence() -> int:
        queued = list(controller.load_queue)
        if not queued:
            return start()
        launched = pages.fence()
        if launched is not None:
            controller.load_stream.wait_event(launched)
        try:
            producer = start()
        except Exception as error:
            controller.load_queue.clear()
            for operation in queued:
                _release(controller, operation)
            nodes = [node for operation in queued for node in operation.node_ids]
            raise HostLoadError(
                f"loading nodes {nodes} from the host failed ({error}); their pages are released"
            ) from error
        for operation in queued:
            for transfer in _window_transfers(operation.pool_transfers):
                pages.loaded(transfer.device_indices)
        return producer

    controller.write, controller.load = write_bundle, load_bundle
    controller.start_loading = start_behind_fence


def is_bundle(transfers: list[Any] | None) -> bool:
    """Does every window page of these PoolTransfers travel with both kinds of its C4 rows?"""
    if not _window_transfers(transfers):
        return True
    with_window = {t.name for t in transfers or [] if t.indices_from_pool == WINDOW}
    return with_window.issuperset(ROWS)


def _window_transfers(transfers: list[Any] | None) -> list[Any]:
    return [t for t in transfers or [] if t.name == WINDOW]


def _check_pools(pages: PageClearer, entries: dict[str, Any]) -> None:
    if WINDOW not in entries:
        return
    missing = [name for name in ROWS if name not in entries]
    if missing:
        raise StateError(f"the host tier keeps window pages but not their rows {missing}")
    release = entries[WINDOW].device_free_fn
    if getattr(release, "__self__", None) is not pages.allocator or pages.allocator is None:
        raise StateError(
            "the host tier must release window pages through the allocator that the page clearer "
            "is attached to"
        )


def _release(controller: Any, operation: Any) -> None:
    """Give back every page a queued load had taken."""
    full = getattr(
        controller.mem_pool_device_allocator,
        "full_attn_allocator",
        controller.mem_pool_device_allocator,
    )
    if operation.device_indices.numel():
        full.free(operation.device_indices)
    for transfer in _window_transfers(operation.pool_transfers):
        controller.mem_pool_host.entry_map[WINDOW].device_free_fn(transfer.device_indices)
