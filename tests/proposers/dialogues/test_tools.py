"""Coffee orders: kept when their calls follow from what was said, cut at the last sentence, with the functions they use on offer."""

import json
from typing import Any

from foretoken.proposers.training.corpus import Message, Record
from foretoken.proposers.training.dialogues.functions_on_offer import call, result
from foretoken.proposers.training.dialogues.tools import BAR, orders


def order(query: str, arguments: dict[str, Any], *more: Message) -> Record:
    messages: tuple[Message, ...] = (
        {"role": "user", "content": "a large mocha, please"},
        call("get_menu_items", {"query": query}),
        result({"menu_items": [{"menu_item_id": "mocha-0404", "name": "Mocha"}]}),
        call("add_order_item", arguments, 2),
        result({"order_id": "85486"}, 2),
        {"role": "assistant", "content": "One mocha. Is that right?"},
        *more,
    )
    return Record("", "", messages, 9)


GOOD = {"menu_item_id": "mocha-0404", "quantity": "1"}


def test_the_functions_used_are_on_offer():
    made, = orders([order("Mocha", GOOD)])
    offered = [tool["function"]["name"] for tool in made.tools]
    assert {"get_menu_items", "add_order_item"} <= set(offered) <= BAR.keys()
    assert 2 <= len(offered) <= 3 and made.key == 9


def test_an_order_ends_with_a_sentence():
    made, = orders([order("Mocha", GOOD, {"role": "user", "content": "yes"}, call("finish_order", {"order_id": "85486"}, 3))])
    assert made.messages[-1]["content"] == "One mocha. Is that right?"


def test_calls_out_of_the_blue_are_left_out():
    assert not list(orders([order("Espresso", GOOD)]))
    assert not list(orders([order("Mocha", {**GOOD, "menu_item_id": "latte-1"})]))
    assert not list(orders([order("Mocha", {"menu_item_id": "mocha-0404"})])), "quantity is required"
    assert not list(orders([order("Mocha", {**GOOD, "attributes": [{"attribute_id": "milk", "option": "Oat Milk"}]})]))
    assert not list(orders([order("Mocha", {**GOOD, "colour": "mocha"})]))


def test_schemas_name_their_required_parameters():
    for tool in BAR.values():
        parameters = tool["function"]["parameters"]
        assert set(parameters["required"]) <= parameters["properties"].keys()
        assert json.dumps(tool)
