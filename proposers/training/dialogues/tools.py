"""Tool calls: the coffee orders of Taskmaster, and everyday functions made by rule. Owns the schemas of the coffee bar."""

import json
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

from ..corpus import Conversation, Message, Record
from .everyday import everyday_tools
from .functions_on_offer import Tool, function

LONGEST_ORDER = 2400                 # characters of all messages

TEXT = {"type": "string"}
LIST = {"type": "array"}
BAR: dict[str, Tool] = {tool["function"]["name"]: tool for tool in (
    function("show_menu", "Show the menu to the customer", {}),
    function("get_menu_items", "Search the menu", {"query": TEXT}, required=("query",)),
    function("get_addons", "List options of a menu item", {"query": TEXT, "menu_item_id": TEXT}, required=("query",)),
    function("add_order_item", "Add an item to the order", {
        "menu_item_id": TEXT, "quantity": TEXT, "attributes": LIST, "addons": LIST, "notes": TEXT, "order_id": TEXT,
    }, required=("menu_item_id", "quantity")),
    function("update_order", "Change the whole order", {"order_id": TEXT, "attributes": LIST}, required=("order_id",)),
    function("update_order_item", "Change one item", {"order_item_id": TEXT, "attributes": LIST, "addons": LIST},
             required=("order_item_id",)),
    function("get_order_details", "Read back the order", {"order_id": TEXT}, required=("order_id",)),
    function("finish_order", "Send the order to the bar", {"order_id": TEXT}, required=("order_id",)),
)}


def orders(records: Iterable[Record]) -> Iterator[Conversation]:
    """Coffee orders whose calls can be known from what was said and returned before; offered are the functions used and one more."""
    for record in records:
        messages = list(record.messages)
        while messages and not (messages[-1]["role"] == "assistant" and messages[-1]["content"]):
            messages.pop()
        if len(json.dumps(messages)) > LONGEST_ORDER or not _follows(messages):
            continue
        used = {call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
        if not used or not used <= BAR.keys():
            continue
        chance = Random(record.key)
        offered = sorted(used | {chance.choice(sorted(BAR))})
        chance.shuffle(offered)
        yield Conversation(messages, record.key, [BAR[name] for name in offered])


def _follows(messages: list[Message]) -> bool:
    """Whether every call names values seen before it, all but one word of a query, and gives what its function requires."""
    said = ""
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            parameters = BAR.get(call["function"]["name"], BAR["show_menu"])["function"]["parameters"]
            if not set(parameters["required"]) <= arguments.keys() <= parameters["properties"].keys():
                return False
            if not all(_seen(value, said) for name, value in arguments.items() if name != "quantity"):
                return False
        said += (message.get("content") or "").lower() + "\n"
    return True


def _seen(value: Any, said: str) -> bool:
    if isinstance(value, dict):
        return all(_seen(part, said) for part in value.values())
    if isinstance(value, list):
        return all(_seen(part, said) for part in value)
    return all(part.strip().lower() in said for part in str(value).split(" OR "))


__all__ = ["everyday_tools", "orders"]
