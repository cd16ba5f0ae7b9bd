"""Page lists as SGLang keeps them, and a prefix tree of pages with a host tier below it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.state import PageClearer, SlotTable


class PageList:
    """LIFO list of free pages; reports to the state life cycle as the served allocator does."""

    def __init__(self, pages: int, clearer: PageClearer | None = None):
        self.num_pages = pages
        self.clearer: PageClearer | None = None
        self.clear()
        self.clearer = clearer
        if clearer is not None:
            clearer.allocator = self

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.num_pages + 1)
        self.release_pages = torch.empty(0, dtype=torch.int64)
        if self.clearer is not None:
            self.clearer.reset()

    def take(self, count: int) -> list[int]:
        taken = self.free_pages[:count].tolist()
        assert len(taken) == count, "the caller checks for room"
        self.free_pages = self.free_pages[count:]
        return taken

    def free(self, pages: list[int]) -> None:
        if not pages:
            return
        if self.clearer is not None:
            self.clearer.refuse_unowned(torch.tensor(pages))
            self.clearer.release(torch.tensor(pages))
        self.put_back(pages)

    def put_back(self, pages: list[int]) -> None:
        """Free pages without telling anybody."""
        self.free_pages = torch.cat([torch.tensor(pages), self.free_pages])

    def __len__(self) -> int:
        return len(self.free_pages)


class SlotList:
    """A token table and its free slots; reports as the served table does."""

    def __init__(self, columns: int, table: SlotTable):
        self.token_table = torch.zeros(len(table.generation), columns, dtype=torch.int32)
        self.free_slots = list(range(1, len(table.generation)))
        self.table = table
        table.lists = self

    def clear(self) -> None:
        self.free_slots = list(range(1, len(self.table.generation)))
        self.table.reset()

    def alloc(self, reqs: list) -> list[int] | None:
        fresh = [req for req in reqs if req.req_pool_idx is None]
        if len(fresh) > len(self.free_slots):
            return None
        for req in fresh:
            req.req_pool_idx = self.free_slots.pop(0)
        self.table.assigned([req.req_pool_idx for req in fresh])
        return [req.req_pool_idx for req in reqs]

    def free(self, req) -> None:
        self.table.released([req.req_pool_idx])
        self.free_slots.append(req.req_pool_idx)
        req.req_pool_idx = None


@dataclass
class Node:
    """One page of a prefix: on the device (full, perhaps swa), on the host, or both."""

    key: int
    parent: "Node | None"
    values: list[int]  # oracle's values of its 256 positions and the 4 before it
    ready: int  # stream ticket after which its content is complete
    full: int | None = None
    swa: int | None = None  # None = tombstone
    host: dict[str, Tensor] | None = None
    used: int = 0
    children: dict[int, "Node"] = field(default_factory=dict)

    @property
    def page(self) -> int:
        """The full page of a node that is on the device."""
        assert self.full is not None
        return self.full

    @property
    def depth(self) -> int:
        """Index of the page in its prefix; the root's children are page 0."""
        return -1 if self.parent is None else self.parent.depth + 1


class Tree:
    """Prefix tree at page granularity."""

    def __init__(self):
        self.root = Node(key=0, parent=None, values=[], ready=0)

    def nodes(self) -> list[Node]:
        found: list[Node] = []
        todo = [self.root]
        while todo:
            node = todo.pop()
            found.extend(node.children.values())
            todo.extend(node.children.values())
        return found

    def path(self, keys: list[int]) -> list[Node]:
        """The nodes of a prefix, as far as the tree knows it."""
        path, node = [], self.root
        for key in keys:
            if key not in node.children:
                break
            node = node.children[key]
            path.append(node)
        return path

    @staticmethod
    def hit(path: list[Node]) -> list[Node]:
        """The part of `path` a request can reuse: on the device, last page with its window rows."""
        on_device = []
        for node in path:
            if node.full is None:
                break
            on_device.append(node)
        while on_device and on_device[-1].swa is None:
            on_device.pop()
        return on_device

    @staticmethod
    def remove(node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
