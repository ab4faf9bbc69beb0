"""Nothing that was said is lost, and nothing that was deleted comes back: reloads, two tabs, a server that was started again."""

import json
import re
from collections.abc import Callable
from typing import Any

FILES = "How do I list the files of a folder?"
FUNCTION = "Write a Python function that adds up a list."
STORY = "Tell me a story."


def test_a_reload_in_the_middle_of_an_answer_keeps_what_came(tab: Any) -> None:
    tab.ask_for_much()
    tab.until("document.querySelectorAll('.message.model .token').length > 20")
    came = tab.answer.inner_text()
    tab.page.reload()
    tab.finished()
    assert tab.answer.inner_text().startswith(came[:40]) and tab.stored()[-1]["answer"]["tokens"]
    assert tab.page.get_by_role("button", name="Regenerate the answer").is_visible()


def test_a_title_ends_with_no_half_of_a_character(tab: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "a" * 46 + "😀 and more"}]}
    assert tab.page.evaluate("async (chat) => (await import('/page/chats.js')).titleOf(chat)", chat) == "a" * 46 + "…"


def test_a_chat_deleted_in_the_middle_of_its_answer_does_not_come_back(tab: Any) -> None:
    tab.ask_for_much()
    tab.page.get_by_role("button", name=STORY, exact=True).click()
    assert tab.page.locator(".message.model[aria-busy=true]").count() == 1, "who opens the chat that is open stops nothing"
    tab.page.get_by_role("button", name=f"Delete {STORY}").click()
    tab.page.wait_for_timeout(300)
    assert tab.page.locator(".chat-title").count() == 0
    tab.page.get_by_role("button", name="Undo").click()
    assert tab.answer.inner_text() and tab.page.locator(".chat-title").all_inner_texts() == [STORY]


def questions(tab: Any) -> list[list[str]]:
    """What was asked in each kept chat."""
    texts = tab.page.evaluate("Object.entries(localStorage).filter(([k]) => k.startsWith('foretoken.chat.')).map(([, v]) => v)")
    return sorted([m["content"] for m in json.loads(text)["messages"] if m["role"] == "user"] for text in texts)


def test_a_second_tab_with_the_same_chat_goes_on_where_the_first_is(tab: Any) -> None:
    tab.ask(FILES)
    second = tab.context.new_page()
    second.goto(tab.url)
    second.fill("#prompt", FUNCTION)
    second.press("#prompt", "Enter")
    second.wait_for_selector(".message.model:last-child[aria-busy=false]")
    tab.until("document.querySelectorAll('.message.user').length === 2")
    tab.ask("Thanks.")
    assert questions(tab) == [[FILES, FUNCTION, "Thanks."]]
    assert tab.page.locator(".chat-title").count() == 1


def test_two_tabs_that_write_in_one_chat_at_once_have_two_chats(tab: Any) -> None:
    tab.ask(FILES)
    second = tab.context.new_page()
    second.goto(tab.url)
    tab.ask_for_much()
    second.wait_for_selector(".message.user >> nth=1")
    second.fill("#prompt", FUNCTION)
    second.press("#prompt", "Enter")
    second.wait_for_selector(".message.model:last-child[aria-busy=false]")
    tab.page.bring_to_front()
    tab.page.click("#send")
    tab.finished()
    assert questions(tab) == [[FILES, STORY], [FILES, STORY, FUNCTION]]
    assert tab.page.locator(".chat-title").count() == second.locator(".chat-title").count() == 2
    assert tab.page.locator(".message.user").count() == 2, "each tab stays at its own"


def test_metrics_begin_anew_with_a_server_that_was_started_again(tab: Any) -> None:
    """A new run of the server has counted less than the one before: rates and shares of the two together mean nothing."""
    tab.ask(FUNCTION)
    counted = tab.page.evaluate("fetch('metrics').then((r) => r.text())")

    def begun_anew(line: str) -> str:
        return line if line.startswith("#") or "_total" not in line else line.rsplit(" ", 1)[0] + " 1"

    fresh = "\n".join(begun_anew(line) for line in counted.splitlines()) + "\n"
    asked: list[str] = []

    def answer(route: Any) -> None:
        asked.append(counted if len(asked) < 2 else fresh)
        route.fulfill(body=asked[-1], content_type="text/plain")

    tab.page.route("**/metrics", answer)
    tab.page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "another-model"}]}))
    tab.page.click("#tab-metrics")
    tab.until("document.getElementById('model').textContent === 'another-model'")
    shown = tab.page.locator("#view-metrics").inner_text()
    assert fresh in asked and not re.search(r"-\d", shown), shown


def test_an_answer_names_the_model_that_gave_it(open_tab: Callable[..., Any]) -> None:
    tab = open_tab()
    tab.until("document.getElementById('model').textContent === 'foretoken-demo'")
    body = json.dumps({"model": "another-model", "choices": [{"index": 0, "delta": {"content": "Yes."}, "finish_reason": "stop"}]})
    events = f"data: {body}\n\ndata: [DONE]\n\n"
    tab.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=events, content_type="text/event-stream"))
    tab.page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "another-model"}]}))
    tab.ask("Is it another?")
    assert tab.page.locator(".message.model .speaker").inner_text() == "another-model"
    tab.until("document.getElementById('model').textContent === 'another-model'")
