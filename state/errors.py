"""What can go wrong with the model's state, each raised on the host at scheduling time."""


class StateError(RuntimeError):
    """The life cycle of slots, pages and compress rings was used against its rules."""


class SlotError(StateError):
    """A request slot was assigned or released by somebody who may not."""


class PageError(StateError):
    """A window page was released by somebody who may not."""


class HostLoadError(StateError):
    """A load from the host tier failed and was undone; the request it was for starts cold."""


class StateInvariantError(StateError):
    """`check()` found a violated invariant; the message names where."""


class StateGeometryError(ValueError):
    """Ring, page or verify sizes that would corrupt state; the message names the broken rule."""
