"""Request slots and their generations.

A slot number alone cannot tell two of its owners apart. The generation can: it grows at every
assignment and never shrinks, not even when everything is flushed, so information recorded under
an older generation is recognised for ever (no ABA).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.state.errors import SlotError


class SlotTable:
    """Who holds which slot, on the host. Slot 0 is padding and has no owner, ever."""

    def __init__(self, slots: int):
        self.generation = torch.zeros(slots + 1, dtype=torch.int64)  # [slots + 1]
        self._held: set[int] = set()
        # Slots whose ring is cleared at the head of the next forward; a dict keeps their order.
        self._pending: dict[int, None] = {}
        self.lists: Any = None  # whoever keeps the free slots; the check compares with it

    @property
    def held(self) -> frozenset[int]:
        return frozenset(self._held)

    @property
    def pending(self) -> list[int]:
        """Slots whose clear has been queued but not launched."""
        return list(self._pending)

    def assigned(self, slots: Sequence[int]) -> None:
        """New owners for `slots`: next generation, ring queued for clearing.

        Raises SlotError, and changes nothing, for slot 0, a slot out of range or one held already.
        """
        for index, slot in enumerate(slots):
            self._check_range(slot)
            if slot in self._held or slot in slots[:index]:
                raise SlotError(
                    f"slot {slot} is assigned while generation {self._now(slot)} holds it"
                )
        for slot in slots:
            self._held.add(slot)
            self.generation[slot] += 1
            self._pending[slot] = None

    def released(self, slots: Sequence[int]) -> None:
        """The owners give `slots` back. Raises SlotError, changing nothing, if one is not held."""
        for index, slot in enumerate(slots):
            self._check_range(slot)
            if slot not in self._held or slot in slots[:index]:
                raise SlotError(f"slot {slot} is released but nobody holds it")
        self._held.difference_update(slots)

    def current(self, slots: Tensor, generation: Tensor) -> Tensor:
        """bool [n]: does information recorded for int [n] `slots` at `generation` still count?

        Only while the owner of that generation holds the slot; stale information is no information.
        """
        slots = slots.cpu().long()
        inside = (slots > 0) & (slots < len(self.generation))
        held = torch.zeros(len(self.generation), dtype=torch.bool)
        held[list(self._held)] = True
        index = torch.where(inside, slots, 0)
        return inside & held[index] & (self.generation[index] == generation.cpu())

    def reset(self) -> None:
        """Flush: nobody holds anything, every earlier generation is past, all rings are cleared."""
        self._held.clear()
        self.generation[1:] += 1
        self._pending = dict.fromkeys(range(1, len(self.generation)))

    def take_pending(self) -> list[int]:
        """Hand over the queue of slots to clear."""
        slots, self._pending = list(self._pending), {}
        return slots

    def free_list(self) -> list[int] | None:
        """Free slots as `lists` has them, None where nobody keeps any."""
        return None if self.lists is None else list(self.lists.free_slots)

    def _check_range(self, slot: int) -> None:
        if not 0 < slot < len(self.generation):
            raise SlotError(f"slot {slot} is not one of 1..{len(self.generation) - 1}")

    def _now(self, slot: int) -> int:
        return int(self.generation[slot])
