"""The scheduler: who gets which slot and page, what is launched, what is released when.

Every public method is one thing that can happen to a server. In overlap mode a launched forward
executes only after the next scheduling round, so releases meet forwards in flight.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dspark.state import SlotTable, StateInvariantError, StateLifecycle
from dspark.state.pages import PageClearer

from .checks import Checks, Violation
from .device import LAYERS, MAX_PAGES, PAGE, SALT, Device, Launch, Row, narrow_geometry
from .faults import Faults
from .memory import Node, PageList, SlotList, Tree
from .oracle import VOCABULARY, Sequence, c4_entries, c128_entries, salted
from .stream import Stream

ALL_CLEARS = frozenset({"slot", "page", "rollback"})
COLUMNS = MAX_PAGES * PAGE
LOAD_STEPS = ("full pages", "window page", *range(LAYERS))


@dataclass(eq=False)
class Request:
    sequence: Sequence
    goal: int  # tokens to prefill
    req_pool_idx: int | None = None
    generation: int = 0
    host_len: int = 0  # tokens the host knows to be committed
    full: list[int] = field(default_factory=list)
    swa: list[int | None] = field(default_factory=list)  # None = left the window
    nodes: list[Node] = field(default_factory=list)  # pages that belong to the tree
    running: bool = False  # past its prefill
    fresh: bool = True
    stop: bool = False  # finish when the next result arrives
    cut: int = 0  # tokens a stop string takes off the end

    @property
    def slot(self) -> int:
        assert self.req_pool_idx is not None
        return self.req_pool_idx

    @property
    def private(self) -> range:
        """Indices of the pages nobody else refers to."""
        return range(len(self.nodes), len(self.full))


@dataclass
class Batch:
    requests: list[tuple[Request, int]]  # with the generation it was launched under
    verify: bool
    ticket: int = 0
    commits: list[int] = field(default_factory=list)


class StreamClearer(PageClearer):
    """Issues its clears on the simulated stream."""

    server: "Server"

    def _clear_pages(self, pages: Tensor) -> None:
        if "page" in self.server.clears:
            self.server.launch_clear(super()._clear_pages, "note_cleared_pages", pages)

    def _clear_slots(self, slots: list[int]) -> None:
        if "slot" in self.server.clears:
            self.server.launch_clear(super()._clear_slots, "note_cleared_slots", slots)


class StuckSlots(SlotTable):
    """Mutation: an assignment leaves the generation where it was."""

    def assigned(self, slots) -> None:
        super().assigned(slots)
        self.generation[list(slots)] -= 1


class Server:
    def __init__(
        self,
        *,
        slots: int = 4,
        full_pages: int = 16,
        window_pages: int = 12,
        overlap: bool = False,
        clears: frozenset[str] = ALL_CLEARS,
        poisoned: bool = False,
        twice: bool = False,
        padding: int = 0,
        debug: bool = False,
        faults: Faults | None = None,
        ignored: frozenset[str] = frozenset(),
        **rings,
    ):
        self.clears, self.twice, self.padding = clears, twice, padding
        self.faults = faults or Faults()
        self.checks = Checks(ignored)
        self.stream = Stream(overlap)
        sizes = narrow_geometry(slots=slots, window_pages=window_pages, **rings)
        # Tags follow the plan at launch, which this overlap model does not know yet.
        self.state = StateLifecycle(sizes, "cpu", debug=debug and not overlap)
        if self.faults.keep_generation:
            self.state.slots = StuckSlots(slots)
        self.state.pages = StreamClearer(self.state.pools, self.state.slots, self.state.tags)
        self.state.pages.server = self
        self.slots = SlotList(COLUMNS, self.state.slots)
        if self.faults.forget_flush:
            self.state.pages.reset = lambda: None
        self.full, self.swa = PageList(full_pages), PageList(window_pages, self.state.pages)
        self.window_table = torch.zeros((full_pages + 1) * PAGE, dtype=torch.int64)
        self.tree = Tree()
        self.device = Device(self.state, full_pages, self.checks, self.faults)
        self.device.expect_empty = clears == ALL_CLEARS and not poisoned
        if poisoned:
            self.device.poison()
        self.live: list[Request] = []
        self.waiting: list[Request] = []
        self.results: deque[Batch] = deque()
        self.epoch: dict[int, int] = {}  # window page -> number of its allocation
        self.first_use: set[int] = set()
        self.owners: list[tuple[int, int]] = []  # every (slot, generation) ever assigned
        self.clock = 0
        self.allocations = 0
        self.delayed: list[Callable[[], None]] = []
        self._spared: set[int] = set()  # nodes that may not be evicted just now

    # -- things that happen --------------------------------------------------------------------

    def admit(self, prompt: list[int], fail_load: int | None = None) -> Request | None:
        """A new request; `fail_load` is the index into LOAD_STEPS at which a host load fails."""
        return self._admit(Request(Sequence(prompt), len(prompt)), fail_load)

    def readmit(self, fail_load: int | None = None) -> Request | None:
        """The request that was retracted first comes back."""
        if not self.waiting:
            return None
        request = self._admit(self.waiting[0], fail_load)
        if request is not None:
            self.waiting.pop(0)
        return request

    def chunk(self, tokens: int, requests: int = 1) -> None:
        """Prefill up to `tokens` tokens of each of the first `requests` that still need it."""
        rows: list[tuple[Request, int]] = []
        for request in [r for r in self.live if not r.running][:requests]:
            if not request.fresh:
                self._publish(request, request.host_len)
            length = min(tokens, request.goal - request.host_len)
            if self._grow(request, request.host_len + length):
                rows.append((request, length))
        if rows:
            self._launch(rows, [length for _, length in rows], verify=False)
            for request, length in rows:
                request.host_len += length
                request.running = request.host_len == request.goal
        self._next_result(launched=bool(rows))

    def verify(self, accepts: list[int], lengths: list[int]) -> None:
        """One step of all running requests: row 0 and drafts, of which `accepts` hold."""
        rows = []
        ahead = 2 * self.state.geometry.verify_width
        for request in [r for r in self.live if r.running]:
            while request in self.live and not self._grow(request, request.host_len + ahead):
                others = [r for r in self.live if r.running and r is not request]
                self.retract(others[-1] if others else request)
        running = [r for r in self.live if r.running]
        for i, request in enumerate(running):
            rows.append((request, lengths[i % len(lengths)]))
        if rows:
            commits = [accepts[i % len(accepts)] for i in range(len(rows))]
            self._launch(rows, commits, verify=True)
        self._next_result(launched=bool(rows))

    def idle(self) -> None:
        """A round without a launch."""
        self._next_result(launched=False)

    def settle(self) -> None:
        """All results arrive."""
        while self.results:
            self._process(self.results.popleft())
        self.stream.drain()

    def finish(self, request: Request, cut: int = 0) -> None:
        """The next result ends the request; a stop string takes `cut` tokens off."""
        request.stop, request.cut = True, cut

    def abort(self, request: Request) -> None:
        self._release(request)

    def retract(self, request: Request) -> None:
        """Taken off to make room; comes back with what the host knows."""
        if request.running:
            known = request.host_len + 1
            self.waiting.append(Request(request.sequence.upto(known), known))
        else:
            self.waiting.append(Request(request.sequence, request.goal))
        self._release(request)

    def slide(self) -> None:
        """Private window pages that no later position reads are released."""
        for request in self.live:
            keep = max(request.host_len - PAGE, 0) // PAGE
            if self.faults.eager_window:
                keep = request.host_len // PAGE + 1
            for k in range(len(request.nodes), min(keep, len(request.full))):
                self._drop_window(request.full[k], request.swa[k])
                request.swa[k] = None

    def evict(self) -> bool:
        """The least recently used unlocked leaf leaves the device."""
        leaves = [
            n
            for n in self.tree.nodes()
            if n.full is not None
            and all(c.full is None for c in n.children.values())
            and not self._locked(n)
        ]
        if not leaves:
            return False
        node = min(leaves, key=lambda n: n.used)
        self._drop_window(node.page, node.swa)
        self.full.free([node.page])
        node.full = node.swa = None
        if node.host is None:
            self.tree.remove(node)
        return True

    def tombstone(self) -> bool:
        """The least recently used window page of the tree is released; its entries stay."""
        nodes = [n for n in self.tree.nodes() if n.swa is not None and not self._window_locked(n)]
        if not nodes:
            return False
        node = min(nodes, key=lambda n: n.used)
        self._drop_window(node.page, node.swa)
        node.swa = None
        return True

    def backup(self) -> None:
        """Every complete page whose parent is on the host goes there, with its C4 rows."""
        for node in self.tree.nodes():
            parent_there = node.depth == 0 or (node.parent and node.parent.host is not None)
            complete = node.swa is not None and node.ready <= self.stream.executed
            if complete and parent_there and node.host is None:
                node.host = self._copy_out(node)

    def squeeze(self) -> None:
        """Back up what is complete, then everything unlocked leaves the device."""
        self.backup()
        while self.evict():
            pass

    def flush(self) -> bool:
        """Forget everything; refused while requests live. A step may still be in flight."""
        if self.live:
            return False
        self.waiting.clear()
        self.tree = Tree()
        before = self.state.slots.generation.clone()
        self.slots.clear()
        if self.faults.restart_generations:
            self.state.slots.generation.zero_()
        self.full.clear()
        self.swa.clear()
        self.window_table.zero_()
        grown = bool((self.state.slots.generation[1:] == before[1:] + 1).all())
        self.checks.require(
            "generation_monotonic", grown, "a flush must count a generation for every slot"
        )
        return True

    def resume(self) -> bool:
        """The pools' memory went away and came back with undefined content."""
        if self.live:
            return False
        self.settle()
        self.flush()
        self.device.poison()
        if self.device.expect_empty:
            self.state.resume()
            self.device.page_written.clear()
            self.device.slot_written.clear()
        self.device.padding_before = self.device._padding_rows()
        return True

    # -- admission and host loads ----------------------------------------------------------------

    def _admit(self, request: Request, fail_load: int | None) -> Request | None:
        if not self.slots.free_slots or request.goal >= COLUMNS - 2 * PAGE // 8:
            return None
        keys = [request.sequence.page_key(k, PAGE) for k in range((request.goal - 1) // PAGE)]
        path = self.tree.path(keys)
        self._load(path, fail_load)
        hit = self.tree.hit(path)
        self.clock += 1
        for node in hit:
            node.used = self.clock
        before = self.state.slots.generation.clone()
        self.slots.alloc([request])
        slot = request.slot
        request.generation = int(self.state.slots.generation[slot])
        before[slot] += 1
        counted = torch.equal(before, self.state.slots.generation)
        self.checks.require(
            "generation_monotonic", counted, f"assigning slot {slot} must count its generation only"
        )
        self.owners.append((slot, request.generation))
        request.nodes = hit
        request.full = [n.page for n in hit]
        request.swa = [n.swa for n in hit]
        request.host_len = len(hit) * PAGE
        for k, node in enumerate(hit):
            self._point(request, k, node.page)
        self.live.append(request)
        return request

    def _load(self, path: list[Node], fail_at: int | None) -> bool:
        """Bring the host part of a prefix back to the device, all of it or nothing."""
        while path and not (path[-1].swa is not None or path[-1].host is not None):
            path = path[:-1]
        usable = []
        for node in path:
            if node.full is None and node.host is None:
                break
            usable.append(node)
        if not usable or (usable[-1].swa is None and usable[-1].host is None):
            return False
        missing = [n for n in usable if n.full is None]
        if not missing and usable[-1].swa is not None:
            return False
        before = self._memory()
        full: list[int] = []
        swa: list[int] = []
        step = "full pages"
        if self._room(len(missing), 1, keep=usable) and fail_at != 0:
            full = self.full.take(len(missing))
            step = "window page"
            if fail_at != 1:
                swa = self._take_window(1)
                step = self._copy_in(usable, missing, full, swa[0], fail_at)
        if step != "done":
            if not self.faults.leak_on_failed_load:
                self.full.free(full)
                self.swa.free(swa)
            same = self._memory() == before
            self.checks.require(
                "all_or_nothing_load", same, f"a load that fails at {step} changes memory"
            )
            queued = [p for ids in self.state.pages.pending_on_host() for p in ids.tolist()]
            self.checks.require(
                "all_or_nothing_load", set(swa) <= set(queued), "its page is not queued for clear"
            )
            return False
        for node, page in zip(missing, full, strict=True):
            node.full = page
        last = usable[-1]
        if last.swa is None:
            last.swa = swa[0]
            self._map(last.page, swa[0])
        else:
            self.swa.free(swa)
        self.first_use -= set(swa)
        if self.state.tags is not None:
            self.state.tags.loaded(torch.tensor(swa))
        self.checks.made["published_pages"] += 1
        return True

    def _copy_in(self, usable, missing, full, swa, fail_at):
        """Runs on the load stream, as early as its ordering allows."""
        if not self.faults.load_before_flush:
            self.state.pages.fence()
        if not (self.faults.load_unordered or self.faults.load_before_flush):
            self.stream.drain()
        rows = usable[-1].host
        for layer in range(LAYERS):
            if fail_at == 2 + layer:
                return LOAD_STEPS[fail_at]
            for node, page in zip(missing, full, strict=True):
                for kind, pool in self.device.entries.items():
                    per_page = 2 if kind == "c128" else 64
                    pool[layer, page * per_page : (page + 1) * per_page] = node.host[kind][layer]
            if self.faults.load_without_rows:
                continue
            for kind in ("c4", "idx"):
                self.state.pools.page_view(kind, layer)[swa] = rows[f"{kind} rows"][layer]
        self.device.page_written[swa] = self.epoch[swa]
        return "done"

    def _copy_out(self, node: Node) -> dict[str, Tensor]:
        copy = {}
        for kind, pool in self.device.entries.items():
            per_page = 2 if kind == "c128" else 64
            copy[kind] = pool[:, node.page * per_page : (node.page + 1) * per_page].clone()
        for kind in ("c4", "idx"):
            copy[f"{kind} rows"] = torch.stack(
                [self.state.pools.page_view(kind, layer)[node.swa] for layer in range(LAYERS)]
            )
        return copy

    # -- launching and results -------------------------------------------------------------------

    def _launch(self, rows: list[tuple[Request, int]], accepts: list[int], verify: bool) -> None:
        launches = self.state.begin_forward()
        self.checks.require(
            "bounded_work", launches <= 2, f"the head of a forward launched {launches}"
        )
        launch = Launch(
            rows=[
                Row(
                    slot=request.slot,
                    generation=request.generation,
                    sequence=request.sequence,
                    length=length,
                    accept=accept,
                    start=None if verify else request.host_len,
                    fresh=request.fresh,
                )
                for (request, length), accept in zip(rows, accepts, strict=True)
            ],
            store_all=verify,
            padding=self.padding,
            token_table=self.slots.token_table.clone(),
            window_table=self.window_table.clone(),
            epoch=dict(self.epoch),
            published=frozenset(n.swa for n in self.tree.nodes() if n.swa is not None),
            first_use=frozenset(self.first_use),
        )
        self.first_use.clear()
        batch = Batch([(request, request.generation) for request, _ in rows], verify)
        late = self.delayed
        self.delayed = []

        def execute():
            batch.commits = self.device.forward(launch)
            for work in late:
                work()
            if not verify or "rollback" not in self.clears:
                return
            epilogue = partial(self.device.rollback, launch, batch.commits)
            if self.faults.rollback_late:
                self.delayed.append(epilogue)
                return
            for _ in range(1 + self.twice):
                epilogue()

        batch.ticket = self.stream.launch(execute)
        for request, _ in rows:
            request.fresh = False
        self.results.append(batch)

    def launch_clear(self, clear, note: str, ids) -> None:
        """Put one clear kernel on the stream (or, mutated, run it now)."""
        owners: dict[int, int] | list[int] = self.state.slots.generation.tolist()
        if note == "note_cleared_pages":
            free = set(self.swa.free_pages.tolist())
            owners = {page: epoch for page, epoch in self.epoch.items() if page not in free}

        def execute():
            for _ in range(1 + self.twice):
                clear(ids)
            getattr(self.device, note)(ids if isinstance(ids, list) else ids.tolist(), owners)

        if self.faults.early_clears:
            execute()
        elif self.faults.slot_clear_late and note == "note_cleared_slots":
            self.delayed.append(lambda: clear(ids))
        else:
            self.stream.launch(execute)

    def _next_result(self, launched: bool) -> None:
        """In overlap mode the forward just launched stays in flight for another round."""
        in_flight = 1 if launched and self.stream.overlap else 0
        while len(self.results) > in_flight:
            self._process(self.results.popleft())

    def _process(self, batch: Batch) -> None:
        self.stream.wait(batch.ticket)
        for (request, generation), commit in zip(batch.requests, batch.commits, strict=True):
            if request not in self.live or request.generation != generation:
                continue  # it left while the step was in flight
            if batch.verify:
                request.host_len += commit
            elif request.running:
                length = request.goal
                if self.faults.publish_allocated:
                    length = len(request.full) * PAGE
                self._publish(request, length)
            too_long = request.host_len >= COLUMNS - 64
            if request.running and batch.verify and (request.stop or too_long):
                self._publish(request, max(request.host_len - request.cut, request.goal))
                self._release(request)

    # -- pages -----------------------------------------------------------------------------------

    def _publish(self, request: Request, length: int) -> None:
        """Give the full pages below `length` to the tree, or take the tree's instead."""
        for k in range(len(request.nodes), length // PAGE):
            parent = request.nodes[-1] if request.nodes else self.tree.root
            key = request.sequence.upto((k + 1) * PAGE).page_key(k, PAGE)
            full, swa = request.full[k], request.swa[k]
            node = parent.children.get(key)
            if node is None:
                node = Node(key, parent, self._page_values(request, k), self.stream.launched)
                parent.children[key] = node
            if node.full is None:  # new, or only on the host
                node.full, node.swa, node.ready = full, swa, self.stream.launched
            else:
                if node.swa is None and swa is not None:  # our rows revive the tombstone
                    self._map(full, None)
                    self._map(node.full, swa)
                    node.swa, node.ready = swa, self.stream.launched
                elif self.faults.wrong_page:
                    self._drop_window(full, node.swa)
                else:
                    self._drop_window(full, swa)
                self.full.free([full])
                request.full[k], request.swa[k] = node.full, node.swa
                self._point(request, k, node.full)
            node.used = self.clock
            request.nodes.append(node)

    def _release(self, request: Request) -> None:
        for k in request.private:
            self._drop_window(request.full[k], request.swa[k])
        self.full.free([request.full[k] for k in request.private])
        self.slots.free(request)
        self.live.remove(request)

    def _grow(self, request: Request, length: int) -> bool:
        """Pages for positions below `length`."""
        need = -(-length // PAGE) - len(request.full)
        if need <= 0:
            return True
        if not self._room(need, need, keep=request.nodes):
            return False
        for full, swa in zip(self.full.take(need), self._take_window(need), strict=True):
            request.full.append(full)
            request.swa.append(swa)
            self._map(full, swa)
            self._point(request, len(request.full) - 1, full)
        return True

    def _room(self, full: int, swa: int, keep: list[Node]) -> bool:
        """Evict until there is room, sparing `keep`."""
        self._spared = set(map(id, keep))
        try:
            while len(self.full) < full:
                if not self.evict():
                    return False
            while len(self.swa) < swa:
                if not (self.tombstone() or self.evict()):
                    return False
            return True
        finally:
            self._spared = set()

    def _locked(self, node: Node) -> bool:
        return id(node) in self._spared or any(node in r.nodes for r in self.live)

    def _window_locked(self, node: Node) -> bool:
        """Some request still reads the window of this page."""
        return id(node) in self._spared or any(
            node in r.nodes and node.depth >= max(r.host_len - 128, 0) // PAGE for r in self.live
        )

    def _take_window(self, count: int) -> list[int]:
        pages = self.swa.take(count)
        for page in pages:
            self.allocations += 1
            self.epoch[page] = self.allocations
        self.first_use |= set(pages)
        return pages

    def _drop_window(self, full: int, swa: int | None) -> None:
        if swa is None:
            return
        self._map(full, None)
        self.first_use.discard(swa)
        if self.faults.unhooked_release:
            self.swa.put_back([swa])
        else:
            self.swa.free([swa])
        if self.faults.early_clears:
            self.state.pages.flush()

    def _map(self, full: int, swa: int | None) -> None:
        slots = torch.arange(PAGE) + (swa * PAGE if swa else 0)
        self.window_table[full * PAGE : (full + 1) * PAGE] = slots if swa else 0

    def _point(self, request: Request, k: int, full: int) -> None:
        table = self.slots.token_table[request.slot]
        table[k * PAGE : (k + 1) * PAGE] = torch.arange(full * PAGE, (full + 1) * PAGE)

    def _page_values(self, request: Request, k: int) -> list[int]:
        values = request.sequence.values
        before = values[k * PAGE - 4 : k * PAGE] if k else [0] * 4
        return before + values[k * PAGE : (k + 1) * PAGE]

    def _memory(self) -> tuple:
        """What an all-or-nothing operation must leave as it was (free lists in any order)."""
        tree = [(n.key, n.full, n.swa, n.host is None) for n in self.tree.nodes()]
        return sorted(self.full.free_pages.tolist()), sorted(self.swa.free_pages.tolist()), tree

    # -- invariants between two events -----------------------------------------------------------

    def check(self) -> None:
        self._check_ownership()
        self._check_generations()
        self._check_requests()
        self._check_published()
        if self.device.expect_empty and not self.stream.overlap:
            self._check_state()

    def _check_state(self) -> None:
        try:
            self.state.check()
            self.checks.made["check()"] += 1
        except StateInvariantError as error:
            raise Violation("check()", str(error)) from error

    def _check_ownership(self) -> None:
        nodes = self.tree.nodes()
        full = [n.full for n in nodes if n.full is not None]
        swa = [n.swa for n in nodes if n.swa is not None]
        for request in self.live:
            full += [request.full[k] for k in request.private]
            private = [request.swa[k] for k in request.private]
            swa += [page for page in private if page is not None]
        for name, owned, pages in (("full", full, self.full), ("window", swa, self.swa)):
            everywhere = sorted(owned + pages.free_pages.tolist())
            self.checks.require(
                "no_leak_no_double",
                everywhere == list(range(1, pages.num_pages + 1)),
                f"{name} pages owned {sorted(owned)} and free {sorted(pages.free_pages.tolist())}",
            )
        slots = sorted([r.slot for r in self.live] + list(self.slots.free_slots))
        held = sorted(self.state.slots.held) == sorted(r.slot for r in self.live)
        everyone = slots == list(range(1, self.state.geometry.slots + 1))
        self.checks.require(
            "no_leak_no_double", held and everyone, f"slots held and free are {slots}"
        )

    def _check_generations(self) -> None:
        """What was recorded for an owner counts exactly as long as the owner lives."""
        if not self.owners:
            return
        slots, generations = (torch.tensor(column) for column in zip(*self.owners, strict=True))
        current = self.state.slots.current(slots, generations).tolist()
        living = {(r.slot, r.generation) for r in self.live}
        expected = [owner in living for owner in self.owners]
        self.checks.require(
            "generation_monotonic", current == expected, f"stale owners among {self.owners}"
        )
        self.checks.require(
            "generation_monotonic", self.state.slots.generation[0] == 0, "slot 0 has an owner"
        )

    def _check_requests(self) -> None:
        limit = 2 * self.state.geometry.verify_width + PAGE
        free = set(self.swa.free_pages.tolist())
        for request in self.live:
            for k in range(max(request.host_len - 128, 0) // PAGE, len(request.full)):
                swa = request.nodes[k].swa if k < len(request.nodes) else request.swa[k]
                self.checks.require(
                    "window",
                    swa is not None and swa not in free,
                    f"page {k} of slot {request.slot} left the window too early",
                )
            if not (request.running and self.stream.executed == self.stream.launched):
                continue
            device, host = self.device.seq_len[request.slot], request.host_len
            allocated = len(request.full) * PAGE
            self.checks.require(
                "host_below_device",
                host <= device <= allocated <= device + limit,
                f"host {host}, device {device}, allocated {allocated}",
            )

    def _check_published(self) -> None:
        """A page in the tree is complete: entries, and the rows its successor reads."""
        for node in self.tree.nodes():
            if node.ready > self.stream.executed:
                continue
            values = np.array(node.values, dtype=np.float32)
            c4 = c4_entries(values)[1:]
            page = values[4:]
            for kind, terms, per_page in (
                ("c4", c4, 64),
                ("idx", c4, 64),
                ("c128", c128_entries(page), 2),
            ):
                want = np.stack([salted(terms, layer + SALT[kind]) for layer in range(LAYERS)])
                pool = self.device.entries[kind]
                if node.full is not None:
                    got = pool[:, node.full * per_page : (node.full + 1) * per_page].numpy()
                    self._require_page(np.array_equal(got, want), node, f"{kind} entries")
                if node.host is not None:
                    same = np.array_equal(node.host[kind].numpy(), want)
                    self._require_page(same, node, f"{kind} entries on the host")
            if node.swa is None:
                continue
            for kind in ("c4", "idx"):
                ring = self.state.geometry.c4.ring
                end = (node.swa + 1) * ring
                got = self.state.pools.tensors[kind][:, end - 4 : end, 1].numpy()
                want = np.stack([salted(page[-4:], layer + SALT[kind]) for layer in range(LAYERS)])
                self._require_page(np.array_equal(got, want), node, f"last {kind} rows")

    def _require_page(self, holds: bool, node: Node, what: str) -> None:
        where = f"page {node.depth} of a prefix, full {node.full}, window {node.swa}"
        self.checks.require("published_pages", holds, f"wrong {what} in {where}")


def prompt(family: int, length: int) -> list[int]:
    """Prompts of a family share their beginnings."""
    return [(family * 31 + i * i) % VOCABULARY for i in range(length)]
