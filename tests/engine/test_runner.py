"""The ragged batch that a plan becomes."""

from rows import a_request

from foretoken.engine.plan import PlanRow, StepPlan
from foretoken.engine.runner import ancestors, batch_lists


def test_prefill_decode_chain_and_tree_in_one_batch() -> None:
    prompt, chain, tree = a_request("p", 5), a_request("c", 3), a_request("t", 2)
    chain.token_ids += [40]
    tree.token_ids += [41]
    plan = StepPlan(
        [
            PlanRow(prompt, 0, 4, [], [], [], [7], samples=False),
            PlanRow(chain, 3, 1, [20, 21], [-1, 0], [0, 0], [2, 5], samples=True),
            PlanRow(tree, 2, 1, [30, 31, 32], [-1, -1, 0], [0, 0, 0], [4, 1], samples=True),
        ],
        block_size=4,
    )
    batch = batch_lists(plan, lambda request: request is tree).batch()
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 40, 20, 21, 41, 30, 31, 32]
    assert batch.query_start_loc.tolist() == [0, 4, 7, 11]
    assert batch.num_causal.tolist() == [4, 3, 1]
    assert batch.seq_lens.tolist() == [4, 6, 6]
    assert batch.positions.tolist() == [0, 1, 2, 3, 3, 4, 5, 2, 3, 3, 4]
    assert batch.slot_mapping.tolist() == [28, 29, 30, 31, 11, 20, 21, 18, 19, 4, 5]
    assert batch.tree_mask.tolist() == [0] * 8 + [0b001, 0b010, 0b101]
    assert batch.logits_indices.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert batch.full_logits.tolist() == [3, 4, 5, 6]


def test_the_last_of_64_tree_tokens_keeps_its_bit() -> None:
    depths, masks = ancestors([-1] * 63 + [62])
    assert depths[-1] == 1 and masks[-1] == 1 << 63 | 1 << 62
    request = a_request("t", 1)
    plan = StepPlan([PlanRow(request, 0, 1, list(range(64)), [-1] * 63 + [62], [0] * 64, range(17), samples=True)], 4)
    batch = batch_lists(plan, lambda request: False).batch()
    assert int(batch.tree_mask[-1]) & (2**64 - 1) == 1 << 63 | 1 << 62
