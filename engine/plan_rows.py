"""From a grant and what was guessed for it to the row that runs: guesses that are no tokens, or not legal, are left out."""

from collections.abc import Sequence

from ..kernels.layout import MAX_TREE_TOKENS
from ..kernels.state_slots import RowState
from ..proposers.base import Draft
from .grammar import GrammarState
from .plan import PlanRow, RowGrant


def plan_row(
    grant: RowGrant, draft: Draft, index: int, most: int, vocab_size: int, state: RowState | None = None
) -> tuple[PlanRow, Sequence[int]]:
    """The grant's row with at most so many guesses of row `index` of the draft; and which of its nodes they are."""
    start = draft.start_loc[index]
    size = max(0, min(draft.start_loc[index + 1] - start, most, MAX_TREE_TOKENS))
    end = start + _num_valid(draft, start, size, vocab_size)
    token_ids, parents, source = draft.token_ids[start:end], draft.parents[start:end], draft.source[start:end]
    nodes: Sequence[int] = range(end - start)
    if nodes and grant.request.grammar is not None:
        nodes = _legal(grant.request.grammar, token_ids, parents, was_drawn=draft.probs is not None)
        token_ids, source = [token_ids[node] for node in nodes], [source[node] for node in nodes]
        parents = _renumbered(nodes, parents)
    row = PlanRow(
        grant.request, grant.num_computed, grant.num_scheduled, token_ids, parents, source, grant.block_table, grant.samples,
        state, is_asked=grant.ceiling > 0,
    )
    return row, nodes


def _num_valid(draft: Draft, start: int, size: int, vocab_size: int) -> int:
    """How many leading nodes of a row's draft are real tokens with a parent before them."""
    for i in range(size):
        if not 0 <= draft.token_ids[start + i] < vocab_size or not -1 <= draft.parents[start + i] < i:
            return i
    return size


def _legal(grammar: GrammarState, token_ids: list[int], parents: list[int], was_drawn: bool) -> list[int]:
    """Nodes of a row's draft to verify: those that the grammar allows, and what must stay for the p/q rules.

    A guess that was drawn may not be dropped for what it is: the rule has to refuse it. What comes behind it is never reached.
    """
    nodes = grammar.legal(token_ids, parents)
    if was_drawn and len(nodes) < len(token_ids) and parents == list(range(-1, len(parents) - 1)):
        nodes.append(len(nodes))
    return nodes


def _renumbered(nodes: Sequence[int], parents: list[int]) -> list[int]:
    """Parents of these nodes among themselves: nodes [0, 2, 3], parents [-1, 0, 0, 2] -> [-1, 0, 1]."""
    place = {-1: -1} | {node: i for i, node in enumerate(nodes)}
    return [place[parents[node]] for node in nodes]
