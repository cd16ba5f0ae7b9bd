"""Life cycle of the model's state: slots, window pages, compress rings and their rollback."""

from dspark.state.errors import (
    HostLoadError,
    PageError,
    SlotError,
    StateError,
    StateGeometryError,
    StateInvariantError,
)
from dspark.state.geometry import RingSpec, StateGeometry
from dspark.state.host import PageHostPool
from dspark.state.lifecycle import StateLifecycle
from dspark.state.pages import PageClearer
from dspark.state.pools import StatePools
from dspark.state.rollback import RingRollback
from dspark.state.slots import SlotTable

__all__ = [
    "HostLoadError",
    "PageClearer",
    "PageError",
    "PageHostPool",
    "RingRollback",
    "RingSpec",
    "SlotError",
    "SlotTable",
    "StateError",
    "StateGeometry",
    "StateGeometryError",
    "StateInvariantError",
    "StateLifecycle",
    "StatePools",
]
