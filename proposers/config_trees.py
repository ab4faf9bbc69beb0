"""The tree that a speculative config asks for: vLLM's list of nodes, or SGLang's three numbers of a tree that grows.

A chain has no tree. `num_speculative_tokens` counts the nodes of a tree, the root left out.
"""

import ast
from typing import Any

from .config import BlockTree, DynamicTree, StaticTree, Tree
from .config_entry import MAX_NUM_SPECULATIVE_TOKENS, ConfigEntry, SpeculativeConfigError

MAX_NODES = MAX_NUM_SPECULATIVE_TOKENS
DEFAULT_DEPTH = 5  # SGLang's num_steps for Llama
DEFAULT_BLOCK_NODES = 16

Path = tuple[int, ...]


def read_tree(entry: ConfigEntry, num_tokens: int | None) -> tuple[Tree | None, int | None]:
    """(tree, num_speculative_tokens), either kind of tree; num_tokens is what the user said. Raises SpeculativeConfigError."""
    wants_dynamic = [key for key in ("eagle_topk", "num_steps", "num_draft_tokens") if entry.peek(key) is not None]
    if not wants_dynamic:
        return read_static_tree(entry, num_tokens)
    if entry.peek("speculative_token_tree") is not None:
        raise SpeculativeConfigError(
            f"{entry.name('speculative_token_tree')} is a fixed tree and {entry.name(wants_dynamic[0])} a dynamic one: give one of them"
        )
    return _dynamic_tree(entry, num_tokens)


def read_static_tree(entry: ConfigEntry, num_tokens: int | None) -> tuple[StaticTree | None, int | None]:
    """[[0], [0, 0], [1]], or the same as text: "[(0,), (0, 0), (1,)]". Nodes come out level by level."""
    value = entry.take("speculative_token_tree")
    if value is None:
        return None, num_tokens
    name = entry.name("speculative_token_tree")
    paths = sorted(_paths(name, value), key=lambda path: (len(path), path))
    known: set[Path] = {()}
    for path in paths:
        if path in known:
            raise SpeculativeConfigError(f"{name} has the node {list(path)} twice")
        if path[:-1] not in known:
            raise SpeculativeConfigError(f"{name} has the node {list(path)}, but not its parent {list(path[:-1])}: add that one")
        known.add(path)
    if len(paths) > MAX_NODES:
        raise SpeculativeConfigError(f"{name} has {len(paths)} nodes, above {MAX_NODES}: leave some out")
    if num_tokens not in (None, len(paths)):
        raise SpeculativeConfigError(f"'num_speculative_tokens' is {num_tokens}, but {name} has {len(paths)} nodes: leave it out")
    is_chain = not any(paths[-1]) and len(paths[-1]) == len(paths)
    return None if is_chain else StaticTree(tuple(paths)), len(paths)


def _paths(name: str, value: Any) -> list[Path]:
    message = f"{name} must be a list of nodes like [[0], [1], [0, 0]], each the ranks (0 to {MAX_NODES - 1}) on its way from the root"
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise SpeculativeConfigError(f"{message}; not {value!r}") from None
    if not isinstance(value, (list, tuple)) or not value:
        raise SpeculativeConfigError(f"{message}; not {value!r}")
    for path in value:
        if not isinstance(path, (list, tuple)) or not path or not all(type(rank) is int and 0 <= rank < MAX_NODES for rank in path):
            raise SpeculativeConfigError(f"{message}; {path!r} is not")
    return [tuple(path) for path in value]


def read_block_tree(entry: ConfigEntry, num_tokens: int | None) -> tuple[BlockTree | None, int | None]:
    """As read_tree, of a block. It is filled in at once: num_steps only says how many of its places are. Raises SpeculativeConfigError."""
    top_k, depth, num_nodes = _numbers(entry, num_tokens)
    if top_k == 1:
        return None, num_nodes
    num_nodes = num_nodes or max(DEFAULT_BLOCK_NODES, depth or 0)
    if depth and depth > num_nodes:
        raise SpeculativeConfigError(f"'num_steps' is {depth}, but a tree of {num_nodes} nodes has no path so long: lower it")
    return BlockTree(top_k, num_nodes, depth or num_nodes), num_nodes


def _numbers(entry: ConfigEntry, num_tokens: int | None) -> tuple[int, int | None, int | None]:
    """(eagle_topk, num_steps, nodes or length of the chain), None = not said.

    num_draft_tokens counts the root, as in SGLang. With eagle_topk 1, its default, the tree is a chain.
    """
    top_k = entry.integer("eagle_topk", 1, MAX_NODES) or 1
    depth = entry.integer("num_steps", 1, MAX_NODES)
    num_draft_tokens = entry.integer("num_draft_tokens", 2, MAX_NODES + 1)
    if top_k == 1:
        without_root = num_draft_tokens and num_draft_tokens - 1
        lengths = {"num_speculative_tokens": num_tokens, "num_steps": depth, "num_draft_tokens - 1": without_root}
        said = {key: length for key, length in lengths.items() if length is not None}
        if len(set(said.values())) > 1:
            listed = ", ".join(f"{key} = {length}" for key, length in said.items())
            raise SpeculativeConfigError(f"with 'eagle_topk' 1 guesses are a chain of one length, not {listed}; for a tree raise it")
        return top_k, depth, next(iter(said.values()), None)
    num_nodes = num_tokens if num_draft_tokens is None else num_draft_tokens - 1
    if num_tokens is not None and num_nodes != num_tokens:
        raise SpeculativeConfigError(
            f"'num_speculative_tokens' {num_tokens} contradicts 'num_draft_tokens' {num_draft_tokens}, which counts the root too: "
            f"leave the first out or make the second {num_tokens + 1}"
        )
    return top_k, depth, num_nodes


def _dynamic_tree(entry: ConfigEntry, num_tokens: int | None) -> tuple[DynamicTree | None, int | None]:
    top_k, depth, num_nodes = _numbers(entry, num_tokens)
    if top_k == 1:
        return None, num_nodes
    if depth is None:
        depth = min(DEFAULT_DEPTH, max(1, MAX_NODES // top_k), num_nodes or DEFAULT_DEPTH)
    if top_k * depth > MAX_NODES:
        raise SpeculativeConfigError(
            f"'eagle_topk' {top_k} x 'num_steps' {depth} = {top_k * depth} nodes would be expanded, above {MAX_NODES}: lower one of them"
        )
    if num_nodes is None:
        num_nodes = min(depth + top_k - 1, MAX_NODES)  # room for the longest path and every alternative to its first token
    largest = top_k + (depth - 1) * top_k * top_k
    if not depth <= num_nodes <= largest:
        raise SpeculativeConfigError(
            f"a tree with 'eagle_topk' {top_k} and 'num_steps' {depth} cannot keep {num_nodes} nodes: "
            f"'num_draft_tokens' may be {depth + 1} to {min(largest, MAX_NODES) + 1}, the root included"
        )
    return DynamicTree(top_k, depth, num_nodes), num_nodes
