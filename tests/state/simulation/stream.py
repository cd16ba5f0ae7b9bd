"""The forward stream: what is launched runs at once, or later and in order."""

from collections import deque
from collections.abc import Callable


class Stream:
    """overlap=False: program order. overlap=True: launches wait until somebody needs them."""

    def __init__(self, overlap: bool):
        self.overlap = overlap
        self.launched = 0
        self.executed = 0
        self._queue: deque[Callable[[], None]] = deque()

    def launch(self, work: Callable[[], None]) -> int:
        """Returns the ticket to pass to `wait`."""
        self.launched += 1
        self._queue.append(work)
        if not self.overlap:
            self.drain()
        return self.launched

    def wait(self, ticket: int) -> None:
        """Execute everything launched up to and including `ticket`."""
        while self.executed < ticket:
            self.executed += 1
            self._queue.popleft()()

    def drain(self) -> None:
        self.wait(self.launched)
