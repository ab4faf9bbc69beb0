"""The race and the second tab: figures on the screen are those of the server."""

from collections.abc import Callable
from typing import Any

import pytest
from running_server import RunningServer

STORY = "Tell me a short story about a lighthouse."


def race(tab: Any, state: str = "done") -> Any:
    tab.page.fill("#prompt", STORY)
    tab.page.click("#race-open")
    dialog = tab.page.get_by_role("dialog", name="Race")
    tab.page.wait_for_selector(f"#race[data-state={state}]")
    return dialog


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_both_sides_say_the_same_and_the_verdict_says_so(open_tab: Callable[..., Any], temperature: str) -> None:
    tab = open_tab({"temperature": temperature, "max_tokens": "150"})
    dialog = race(tab)
    texts = [tab.page.locator(f"#race-{side}-text").text_content() for side in ("with", "without")]
    assert texts[0] == texts[1] and texts[0]
    verdict = tab.page.locator("#race-verdict").inner_text()
    assert verdict.startswith("The texts are the same") and "with speculation" in verdict
    assert tab.page.locator("#race-without-text .token:not(.of-target)").count() == 0
    assert tab.page.locator("#race-with-text .token:not(.of-target)").count() > 0
    assert "1.00 per pass" in tab.page.locator("#race-without-facts").inner_text()
    guessing, plain = tab.sent[:2]
    assert (guessing["speculation"], plain["speculation"]) == ({"method": "auto"}, {"method": "off"})
    assert guessing["seed"] == plain["seed"] and len({body["cache_salt"] for body in tab.sent}) == len(tab.sent)
    clocks = [float(tab.page.locator(f"#race-{side}-clock").inner_text().split()[0]) for side in ("with", "without")]
    won = tab.page.locator(".lane.won").get_attribute("id")
    assert won == ("race-with-lane" if clocks[0] <= clocks[1] else "race-without-lane") or clocks[0] == clocks[1]
    assert tab.page.locator("#race").get_by_role("status").inner_text() == verdict, "an open dialog silences what is live outside of it"
    tab.page.keyboard.press("Escape")
    assert dialog.is_hidden() and tab.page.locator("#prompt").input_value() == STORY
    assert tab.page.locator("#rate-with").inner_text() != "–" and tab.page.locator("#rate-without").inner_text() != "–"
    assert tab.page.locator(".message").count() == 0, "a race is no part of the chat"


def test_a_short_race_is_shown_again_slowly_pass_by_pass(open_tab: Callable[..., Any]) -> None:
    tab = open_tab({"temperature": "0", "max_tokens": "150"}, reduced_motion="no-preference")
    race(tab, "replaying")
    assert "times slower" in tab.page.locator("#race-pace").inner_text()
    tab.page.wait_for_timeout(1500)
    half = [tab.page.locator(f"#race-{side}-text").text_content() for side in ("with", "without")]
    tab.page.wait_for_selector("#race[data-state=done]")
    whole = tab.page.locator("#race-with-text").text_content()
    assert all(len(text) < len(whole) for text in half)


def test_closing_a_race_ends_it_on_the_server(open_tab: Callable[..., Any]) -> None:
    tab = open_tab({"temperature": "0", "max_tokens": "1900"})
    tab.page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=route.request.post_data[:-1] + ',"ignore_eos":true}'))
    race(tab, "running")
    tab.page.wait_for_selector("#race-with-text .token")
    tab.page.get_by_role("button", name="Close the race").click()
    tab.until("fetch('metrics').then((r) => r.text()).then((text) => /num_requests_running\\{[^}]*\\} 0/.test(text))")


def test_the_metrics_tab_draws_what_the_server_says(tab: Any, demo_server: RunningServer) -> None:
    tab.page.click("#tab-metrics")
    assert tab.page.url.endswith("#metrics")
    tab.page.wait_for_timeout(2500)
    demo_server.complete(STORY, max_tokens=200, ignore_eos=True)
    rates = tab.page.locator(".card", has_text="Tokens per second")
    tab.until("!document.querySelector('.card .figures b').textContent.startsWith('0.0')")
    assert "generated" in rates.locator("svg").get_attribute("aria-label")
    assert len(rates.locator("path.line").first.get_attribute("d")) > 20
    per_pass = tab.page.locator(".card", has_text="Tokens per target pass").locator(".figures b").inner_text()
    assert 1.0 <= float(per_pass) <= 9.0
    tab.page.wait_for_timeout(1500)
    with demo_server.client() as client:
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("foretoken:proposer_draft_tokens_total")]
    shown = {row.split("\t")[0]: row.split("\t")[2].replace(",", "") for row in tab.page.locator("#proposers tr").all_inner_texts()}
    assert shown == {line.split('proposer="')[1].split('"')[0]: f"{float(line.split()[-1]):.0f}" for line in lines}
    state = tab.page.locator("#state").inner_text()
    assert "peculating" in state and ("draft" in state or "guess" in state) and "exactly the target's" in state
    tab.page.reload()
    tab.page.wait_for_selector("#view-metrics:visible")


def test_metrics_are_read_once_a_second_and_only_while_they_are_shown(tab: Any) -> None:
    def asked() -> int:
        return sum(url.endswith("/metrics") for url in tab.requests)

    # Again and again, too, before the server has answered.
    tab.page.evaluate("for (const view of ['metrics', 'metrics', 'chat', 'metrics']) document.getElementById(`tab-${view}`).click()")
    before = asked()
    tab.page.wait_for_timeout(4200)
    assert 2 <= asked() - before <= 5
    tab.page.click("#tab-chat")
    tab.page.wait_for_timeout(300)
    before = asked()
    tab.page.wait_for_timeout(2500)
    assert asked() == before
