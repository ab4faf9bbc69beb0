"""Trees in vLLM's and in SGLang's words, and the chains that some of them are."""

from typing import Any

import pytest

from foretoken.proposers.config import BlockConfig, BlockTree, DynamicTree, EagleConfig, StaticTree
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.config_reading import parse_speculative_config


def eagle(**keys: Any) -> EagleConfig:
    (proposer,) = parse_speculative_config({"method": "eagle", "model": "E", **keys}).proposers
    assert isinstance(proposer, EagleConfig)
    return proposer


@pytest.mark.parametrize("value", [[[0], [0, 0], [1], [0, 1]], "[(1,), (0, 1), (0,), (0, 0)]"])
def test_a_static_tree_is_ordered_level_by_level(value: Any) -> None:
    config = eagle(speculative_token_tree=value)
    assert config.tree == StaticTree(((0,), (1,), (0, 0), (0, 1))) and config.num_speculative_tokens == 4
    assert eagle(medusa_choices=value, num_speculative_tokens=4) == config


def test_a_tree_of_one_branch_of_best_ranks_is_a_chain() -> None:
    assert eagle(speculative_token_tree="[(0,), (0, 0), (0, 0, 0)]") == EagleConfig("E", num_speculative_tokens=3)
    assert eagle(speculative_token_tree=[[1], [1, 0]]).tree == StaticTree(((1,), (1, 0)))


@pytest.mark.parametrize(
    ("keys", "tree"),
    [
        ({"eagle_topk": 4, "num_steps": 5, "num_draft_tokens": 8}, DynamicTree(4, 5, 7)),
        ({"speculative_eagle_topk": 4, "speculative_num_steps": 5, "speculative_num_draft_tokens": 8}, DynamicTree(4, 5, 7)),
        ({"eagle_topk": 8, "num_steps": 8, "num_draft_tokens": 65}, DynamicTree(8, 8, 64)),
        ({"eagle_topk": 4}, DynamicTree(4, 5, 8)),
        ({"eagle_topk": 4, "num_steps": 3}, DynamicTree(4, 3, 6)),
        ({"eagle_topk": 20}, DynamicTree(20, 3, 22)),
        ({"eagle_topk": 64}, DynamicTree(64, 1, 64)),
        ({"eagle_topk": 4, "num_draft_tokens": 4}, DynamicTree(4, 3, 3)),
        ({"eagle_topk": 4, "num_speculative_tokens": 12}, DynamicTree(4, 5, 12)),
        ({"eagle_topk": 4, "num_speculative_tokens": 12, "num_draft_tokens": 13}, DynamicTree(4, 5, 12)),
    ],
)
def test_dynamic_trees_and_their_defaults(keys: dict[str, int], tree: DynamicTree) -> None:
    config = eagle(**keys)
    assert config.tree == tree and config.num_speculative_tokens == tree.num_nodes


@pytest.mark.parametrize(
    "keys",
    [
        {"num_steps": 3},
        {"num_draft_tokens": 4},
        {"eagle_topk": 1, "num_steps": 3, "num_draft_tokens": 4},
        {"eagle_topk": 1, "num_steps": 3, "num_speculative_tokens": 3},
    ],
)
def test_one_child_a_node_is_a_chain(keys: dict[str, int]) -> None:
    assert eagle(**keys) == EagleConfig("E", num_speculative_tokens=3)
    assert eagle(eagle_topk=1) == EagleConfig("E")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"speculative_token_tree": [[0], [1, 0]]}, "has the node [1, 0], but not its parent [1]"),
        ({"medusa_choices": [[0], [0]]}, "'medusa_choices' has the node [0] twice"),
        ({"speculative_token_tree": [[i] for i in range(64)] + [[0, 0]]}, "has 65 nodes, above 64"),
        ({"speculative_token_tree": [[0], [1]], "num_speculative_tokens": 3}, "'num_speculative_tokens' is 3, but"),
        ({"speculative_token_tree": "[(0,), __import__('os')]"}, "must be a list of nodes"),
        ({"speculative_token_tree": "[" * 5000}, "must be a list of nodes"),
        ({"speculative_token_tree": []}, "must be a list of nodes"),
        ({"speculative_token_tree": [[0], []]}, "[] is not"),
        ({"speculative_token_tree": [[0], [True]]}, "[True] is not"),
        ({"speculative_token_tree": [[-1]]}, "[-1] is not"),
        ({"speculative_token_tree": [[0]], "speculative_num_steps": 2}, "'speculative_num_steps' a dynamic one: give one of them"),
        ({"num_steps": 3, "num_draft_tokens": 8}, "not num_steps = 3, num_draft_tokens - 1 = 7"),
        ({"eagle_topk": 1, "num_steps": 3, "num_speculative_tokens": 5}, "not num_speculative_tokens = 5, num_steps = 3"),
        ({"eagle_topk": 10, "num_steps": 8}, "'eagle_topk' 10 x 'num_steps' 8 = 80 nodes would be expanded, above 64"),
        ({"eagle_topk": 2, "num_steps": 2, "num_draft_tokens": 8}, "'num_draft_tokens' may be 3 to 7"),
        ({"eagle_topk": 2, "num_steps": 5, "num_draft_tokens": 4}, "cannot keep 3 nodes"),
        ({"eagle_topk": 4, "num_draft_tokens": 8, "num_speculative_tokens": 8}, "leave the first out or make the second 9"),
        ({"eagle_topk": 4, "num_draft_tokens": 66}, "'num_draft_tokens' must be an integer from 2 to 65"),
        ({"eagle_topk": 0}, "'eagle_topk' must be an integer from 1 to 64"),
    ],
)
def test_contradictions_are_said(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(SpeculativeConfigError) as caught:
        eagle(**keys)
    assert words in str(caught.value)


def test_a_blocks_tree_has_room_for_its_longest_path() -> None:
    asked = {"method": "dflash", "model": "M", "eagle_topk": 4, "num_steps": 9}
    (block,) = parse_speculative_config(asked).proposers
    assert isinstance(block, BlockConfig) and block.tree == BlockTree(4, 16, 9)
    with pytest.raises(SpeculativeConfigError, match="'num_steps' is 9, but a tree of 8 nodes has no path so long"):
        parse_speculative_config({**asked, "num_draft_tokens": 9})
