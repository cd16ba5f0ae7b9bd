"""SGLang's table of request slots; who holds which slot reaches the state life cycle."""

from typing import Any

from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import get_exec

from dspark.state import SlotTable


class RequestSlots(ReqToTokenPool):
    """A slot is assigned once per request, however many chunks its prompt has."""

    _slots: SlotTable | None = None

    def report_to(self, slots: SlotTable) -> None:
        self._slots = slots
        slots.lists = self

    def alloc(self, reqs: list[Any]) -> list[int] | None:
        fresh = [req for req in reqs if req.req_pool_idx is None]
        found = super().alloc(reqs)
        if found is not None and self._slots is not None:
            self._slots.assigned([req.req_pool_idx for req in fresh])
        return found

    def free(self, req: Any) -> None:
        if self._slots is not None:
            self._slots.released([req.req_pool_idx])
        super().free(req)

    def clear(self) -> None:
        # SGLang would restart its own generations at 0, where old records look current again.
        seen = self.req_generation.clone()
        super().clear()
        seen[1:] += 1
        self.req_generation.copy_(seen)
        if self._slots is not None:
            self._slots.reset()


def build_request_slots(
    configurator: Any, *, max_num_reqs: int, extra_max_context_len: int
) -> RequestSlots:
    """configurator: SGLang's KVCacheConfigurator."""
    return RequestSlots(
        size=max_num_reqs,
        max_context_len=configurator.model_config.context_len + extra_max_context_len,
        device=configurator.device,
        enable_memory_saver=get_exec().features.enable_memory_saver,
    )
