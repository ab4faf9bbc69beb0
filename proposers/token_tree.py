"""A row's guesses as a tree of tokens in which nothing stands twice. Knows no proposer."""

from collections.abc import Sequence


class TokenTree:
    """Nodes, parents before their children; -1 is the root, the last known token."""

    def __init__(self, room: int) -> None:
        """room: most nodes."""
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self._room = room
        self._nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, parent: int, path: Sequence[int]) -> int:
        """The last node of this path behind a node, or of what there is room for."""
        for token in path:
            node = self._nodes.get((parent, token))
            if node is None:
                if len(self.token_ids) == self._room:
                    break
                node = self._nodes[parent, token] = len(self.token_ids)
                self.token_ids.append(token)
                self.parents.append(parent)
            parent = node
        return parent

    def places(self, token_ids: Sequence[int], parents: Sequence[int]) -> dict[int, int]:
        """Nodes that are in another tree, too -> where they are there; -1 is the root of both."""
        own, found = [-1], {-1: -1}  # own: of each node there, what it is here; -2 = nothing
        for place, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
            node = self._nodes.get((own[parent + 1], token))
            own.append(-2 if node is None else node)
            if node is not None:
                found[node] = place
        return found
