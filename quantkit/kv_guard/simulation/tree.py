"""A radix tree of whole pages: what others may read, who reads it, and what goes when room is wanted."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quantkit.kv_guard.simulation.content import words_of
from quantkit.kv_guard.simulation.watched import Known

Key = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """Pages that always come together. ``pages`` is None where only the host's memory has them, ``host_pages`` where it
    has none; ``held`` is what the guard returned, on the device's time. A busy node is being copied: it stays whole."""

    keys: list[Key]
    first: int  # the logical index of its first page
    parent: "Node | None"
    pages: list[int] | None = None
    host_pages: list[int] | None = None
    held: Known | None = None
    host_held: Known | None = None
    readers: int = 0
    is_busy: bool = False
    used: int = 0
    children: dict[Key, "Node"] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The logical index behind its last page."""
        return self.first + len(self.keys)

    def words(self) -> Tensor:
        """Of its tokens."""
        tokens = [token for one in self.path() for key in one.keys for token in key]
        return words_of(tokens, len(tokens))[len(tokens) - sum(map(len, self.keys)) :]

    def path(self) -> list["Node"]:
        """From the root's child on."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inserted:
    """What became of a row's pages: ``fresh`` nodes took them, of ``replaced`` ones the tree had its own."""

    node: Node
    fresh: list[Node]
    replaced: list[Node]


class Tree:
    """``tell_split`` hears of a front, its back and the pages of the front."""

    def __init__(self, tell_split: Callable[[Node, Node, int], None]) -> None:
        self._tell_split = tell_split
        self._clock = 0
        self.root = Node(keys=[], first=0, parent=None, pages=[])

    def match(self, keys: Sequence[Key]) -> Node:
        """The deepest node whose pages are all wanted; one that is wanted in part is split."""
        self._clock += 1
        node, at = self.root, 0
        while at < len(keys):
            child = node.children.get(keys[at])
            if child is None:
                break
            common = _num_common(child.keys, keys[at:])
            if common < len(child.keys):
                if child.is_busy:
                    break
                child = self._split(child, common)
            node, at = child, at + common
            node.used = self._clock
        return node

    def insert(self, keys: Sequence[Key], pages: Sequence[int]) -> Inserted:
        """Pages of a row, from its first on."""
        node = self.match(keys)
        fresh: list[Node] = []
        replaced: list[Node] = []
        for one in node.path():
            if one.pages is None:
                if one.is_busy:  # it is on its way here already: the row keeps its own from there on
                    return Inserted(node=one.parent or self.root, fresh=fresh, replaced=replaced)
                one.pages = list(pages[one.first : one.end])
                fresh.append(one)
            elif one.pages != list(pages[one.first : one.end]):
                replaced.append(one)
        if node.end < len(keys) and keys[node.end] not in node.children:
            leaf = Node(keys=list(keys[node.end :]), first=node.end, parent=node, pages=list(pages[node.end :]))
            leaf.used = self._clock
            node.children[leaf.keys[0]] = leaf
            fresh.append(leaf)
            node = leaf
        return Inserted(node=node, fresh=fresh, replaced=replaced)

    def _split(self, node: Node, count: int) -> Node:
        """The front of a node, ``count`` pages, which is new; the node keeps the back."""
        front = Node(keys=node.keys[:count], first=node.first, parent=node.parent, readers=node.readers)
        front.used = node.used
        if node.pages is not None:
            front.pages, node.pages = node.pages[:count], node.pages[count:]
        if node.host_pages is not None:
            front.host_pages, node.host_pages = node.host_pages[:count], node.host_pages[count:]
        if node.host_held is not None:
            front.host_held, node.host_held = node.host_held[:count], node.host_held[count:]
        node.keys, node.first = node.keys[count:], node.first + count
        assert node.parent is not None
        node.parent.children[front.keys[0]] = front
        node.parent, front.children = front, {node.keys[0]: node}
        self._tell_split(front, node, count)
        return front

    def lock(self, node: Node) -> None:
        """It is read, and all above it."""
        for one in node.path():
            one.readers += 1

    def unlock(self, node: Node) -> None:
        """One reader less."""
        for one in node.path():
            one.readers -= 1

    def nodes(self) -> Iterator[Node]:
        """All but the root, parents first."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def evictable(self) -> list[Node]:
        """Those that nobody reads and none hangs on with pages, the one that was used longest ago first."""
        found = [node for node in self.nodes() if node.pages is not None and self._is_idle(node)]
        return sorted(found, key=lambda node: node.used)

    def evict(self, node: Node) -> list[int]:
        """The pages of a node, which is gone unless the host's memory has it. The device may still ask what it held."""
        pages, node.pages = node.pages or [], None
        if node.host_pages is None:
            self.remove(node)
        return pages

    def evictable_on_host(self) -> list[Node]:
        """Likewise, of the host's memory."""
        found = [
            node
            for node in self.nodes()
            if node.host_pages is not None
            and not (node.readers or node.is_busy)
            and all(child.host_pages is None for child in node.children.values())
        ]
        return sorted(found, key=lambda node: node.used)

    def evict_on_host(self, node: Node) -> list[int]:
        """The host's pages of a node, which is gone if it had no others."""
        pages, node.host_pages, node.host_held = node.host_pages or [], None, None
        if node.pages is None:
            self.remove(node)
        return pages

    def has(self, node: Node) -> bool:
        """It was not taken out meanwhile, nor anything above it."""
        return all(one.parent is not None and one.parent.children.get(one.keys[0]) is one for one in node.path())

    def remove(self, node: Node) -> None:
        """Take a node out, and all below it."""
        if node.parent is not None and node.parent.children.get(node.keys[0]) is node:
            del node.parent.children[node.keys[0]]

    def _is_idle(self, node: Node) -> bool:
        return not (node.readers or node.is_busy or any(child.pages is not None for child in node.children.values()))


def _num_common(mine: Sequence[Key], others: Sequence[Key]) -> int:
    count = 0
    for one, other in zip(mine, others, strict=False):
        if one != other:
            break
        count += 1
    return count
