"""The page as people use it: chat, tokens, stop, edit, history, failures, keys, in a real browser against a real server."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_adapters import pairs_for, save_adapter
from recurrent_models import EMBEDDED
from running_server import RunningServer, start_server

FILES = "How do I list the files of a folder?"
FUNCTION = "Write a Python function that adds up a list."


def said_tokens(tab: Any) -> list[tuple[str, str | None, float]]:
    """(text, proposer, log probability) of the last stream's tokens, end markers left out."""
    found: list[tuple[str, str | None, float]] = []
    for chunk in tab.stream():
        for choice in chunk["choices"]:
            for said, source in zip((choice["logprobs"] or {}).get("content", ()), choice.get("speculation", ()), strict=True):
                found.append((bytes(said["bytes"]).decode(), source["proposer"], said["logprob"]))
    return [token for token in found if not token[0].startswith("<|")]


def test_an_answer_streams_and_is_what_the_api_says(tab: Any, demo_server: RunningServer) -> None:
    tab.ask(FILES)
    body = {"messages": [{"role": "user", "content": FILES}], "temperature": 0}
    with demo_server.client() as client:
        expected = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert tab.stored()[-1]["answer"]["content"] == expected
    assert tab.answer.locator("p").first.inner_text() == expected.split("\n")[0]
    assert tab.answer.locator("pre code").inner_text().strip() == expected.split("```")[1].split("\n", 1)[1].strip()
    assert tab.page.locator("#model").inner_text() == "foretoken-demo"
    assert expected in tab.page.locator("#announcer").text_content(), "screen readers hear finished answers"


def test_every_token_has_the_colour_of_who_said_it_and_tells_its_place_and_probability(tab: Any) -> None:
    tab.page.uncheck("#formatted")
    tab.ask(FUNCTION)
    tokens = said_tokens(tab)
    shown = tab.answer.locator(".token").evaluate_all("all => all.map(t => [t.textContent, t.className])")
    assert [text for text, _ in shown] == [text for text, _, _ in tokens]
    look = {}
    for (_, proposer, _), (_, classes) in zip(tokens, shown, strict=True):
        assert look.setdefault(proposer, classes) == classes
    assert look[None] == "token of-target" and len(set(look.values())) == len(look) >= 2, "at least one guess was kept"
    background = "t => getComputedStyle(t).backgroundColor"
    guessed = tab.answer.locator(".token:not(.of-target)").first
    assert guessed.evaluate(background) != tab.answer.locator(".of-target").first.evaluate(background)
    tab.page.uncheck("#coloured")
    assert guessed.evaluate(background) == tab.answer.locator(".of-target").first.evaluate(background)
    legend = tab.page.locator("#legend").inner_text()
    assert all((proposer or "target") in legend for proposer in look)

    tab.page.check("#coloured")
    position, guesses = 0, []  # of each guess: its place in the run of guesses
    for index, (_, proposer, _) in enumerate(tokens):
        position = 0 if proposer is None else position + 1
        if position:
            guesses.append((index, position))
    index, place = max(guesses, key=lambda guess: guess[1])
    text, proposer, logprob = tokens[index]
    tab.answer.locator(".token").nth(index).hover()
    tip = tab.page.locator("#token-tip")
    assert tip.is_visible()
    told = tip.inner_text()
    assert f"guessed by {proposer}" in told and f"guess {place} of {place}" in told
    assert ("over 99.9 %" if math.exp(logprob) > 0.9995 else f"{100 * math.exp(logprob):.1f} %") in told
    assert text.strip() in told
    tab.page.locator("#prompt").hover()
    assert tip.is_hidden()


def test_the_strip_counts_what_the_stream_says(tab: Any) -> None:
    tab.ask(FUNCTION)
    tokens = [source for chunk in tab.stream() for choice in chunk["choices"] for source in choice.get("speculation", ())]
    passes = sum(source["proposer"] is None for source in tokens) + (tokens[-1]["proposer"] is not None)  # the end may be guessed
    shown = float(tab.page.locator("#per-pass").inner_text())
    assert shown == pytest.approx(len(tokens) / passes, abs=0.00501)  # two places; a half is rounded up here and to even there
    metrics = tab.stream()[-1]["metrics"]
    assert tab.page.locator("#rate-with").inner_text() == f"{round(metrics['tokens_per_second']):,}"
    histogram = metrics["speculative_decoding"]["acceptance_histogram"]
    kept_first = sum(histogram[1:])  # passes that kept a guess, as the server counts them
    assert f"position 1: {math.floor(100 * kept_first / passes + 0.5)} %" in tab.page.locator("#positions").get_attribute("aria-label")
    assert f"{sum(k * n for k, n in enumerate(histogram))} of" in tab.page.locator(".facts").first.inner_text()


def test_stop_keeps_what_came_and_frees_the_server(tab: Any, demo_server: RunningServer) -> None:
    with demo_server.client() as client:
        before = aborted(client.get("/metrics").text)
    tab.ask_for_much()
    tab.page.fill("#prompt", "typed meanwhile")
    assert tab.page.locator("#send").inner_text() == "Stop"
    tab.page.click("#send")
    tab.finished()
    assert tab.page.locator("#send").inner_text() == "Send"
    assert tab.page.locator("#prompt").input_value() == "typed meanwhile"
    came = tab.answer.inner_text()
    assert came and tab.page.locator(".failure:visible").count() == 0
    tab.until("fetch('metrics').then((r) => r.text()).then((text) => /num_requests_running\\{[^}]*\\} 0/.test(text))")
    with demo_server.client() as client:
        assert aborted(client.get("/metrics").text) == before + 1
    assert tab.answer.inner_text() == came


def aborted(metrics: str) -> float:
    return next(float(line.split()[-1]) for line in metrics.splitlines() if "request_success_total" in line and '"abort"' in line)


def test_regenerate_edit_and_undo(tab: Any) -> None:
    tab.ask(FILES)
    first = tab.answer.inner_text()
    tab.page.get_by_role("button", name="Regenerate the answer").click()
    tab.finished()
    assert tab.answer.inner_text() == first, "greedy: the same again"
    tab.page.get_by_role("button", name="Edit your message and ask again").click()
    box = tab.page.get_by_role("textbox", name="Your message, to change")
    assert box.input_value() == FILES
    box.fill(FUNCTION)
    box.press("Enter")
    tab.page.wait_for_selector("pre")
    tab.finished()
    assert [message["role"] for message in tab.stored()] == ["user", "assistant"]
    assert tab.stored()[0]["content"] == FUNCTION and tab.answer.inner_text() != first
    tab.page.get_by_role("button", name="Undo").click()
    assert tab.stored()[0]["content"] == FILES and tab.answer.inner_text() == first


def test_copy_puts_the_source_on_the_clipboard(tab: Any) -> None:
    tab.ask(FILES)
    copying = tab.page.get_by_role("button", name="Copy the answer")
    copying.click()
    assert tab.page.evaluate("navigator.clipboard.readText()") == tab.stored()[-1]["answer"]["content"]
    tab.page.get_by_role("button", name="Copy code").click()
    assert tab.page.evaluate("navigator.clipboard.readText()") == tab.page.locator("pre code").text_content()
    copying.click()
    tab.page.wait_for_timeout(2000)
    assert copying.inner_text() == "Copy"

    # As on pages of plain http from another machine.
    tab.page.evaluate("navigator.clipboard.writeText('')")
    tab.page.evaluate("globalThis.board = navigator.clipboard; Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    copying.click()
    assert tab.page.evaluate("board.readText()") == tab.stored()[-1]["answer"]["content"]
    assert copying.inner_text() == "Copied" and copying.evaluate("el => el === document.activeElement")


def test_chats_stay_in_the_browser_and_can_be_exported_and_deleted(tab: Any) -> None:
    tab.ask(FILES)
    answer, classes = tab.answer.inner_text(), tab.answer.locator(".token").evaluate_all("all => all.map(t => t.className)")
    tab.page.click("#new-chat")
    tab.ask(FUNCTION)
    tab.page.fill("#prompt", "not sent yet")
    tab.page.reload()
    assert tab.page.locator("#prompt").input_value() == "not sent yet"
    assert tab.page.locator(".chat-title").all_inner_texts() == [FUNCTION, FILES]
    tab.page.get_by_role("button", name=FILES, exact=True).click()
    assert tab.answer.inner_text() == answer
    assert tab.answer.locator(".token").evaluate_all("all => all.map(t => t.className)") == classes, "colours are kept too"
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name=f"Export {FILES}").click()
    exported = json.loads(download.value.path().read_text())
    assert [message["role"] for message in exported["messages"]] == ["user", "assistant"] and exported["title"] == FILES
    tab.page.get_by_role("button", name=f"Delete {FILES}").click()
    assert tab.page.locator(".chat-title").all_inner_texts() == [FUNCTION] and tab.page.locator("#welcome").is_visible()
    tab.page.get_by_role("button", name="Undo").click()
    assert tab.answer.inner_text() == answer


def test_settings_are_sent_and_kept(tab: Any) -> None:
    tab.page.click("#settings-toggle")
    tab.page.get_by_label("System prompt").fill("Answer briefly.")
    tab.page.get_by_label("Longest answer").fill("5")
    tab.page.get_by_label("Seed").fill("7")
    choices = tab.page.get_by_label("Who guesses")
    tab.until("document.querySelectorAll('#setting-method option').length > 2")  # the server has said what it has
    assert choices.locator("option").evaluate_all("all => all.map(o => o.value)") == ["", "ngram", "draft_model", "off"]
    choices.select_option("off")
    tab.ask(FUNCTION)
    sent = tab.sent[-1]
    assert sent["messages"][0] == {"role": "system", "content": "Answer briefly."}
    assert (sent["temperature"], sent["max_tokens"], sent["seed"], sent["speculation"]) == (0, 5, 7, {"method": "off"})
    assert "5 tokens" in tab.page.locator(".facts").first.inner_text() and "length limit" in tab.page.locator(".facts").first.inner_text()
    assert tab.page.locator("#per-pass").inner_text() == "1.00"
    assert tab.page.locator("#rate-without").inner_text() != "–"
    tab.page.reload()
    tab.page.click("#settings-toggle")
    assert tab.page.get_by_label("Longest answer").input_value() == "5" and choices.input_value() == "off"
    choices.select_option("draft_model")
    tab.page.reload()
    tab.ask(FUNCTION)
    assert tab.sent[-1]["speculation"] == {"method": "draft_model"}


def test_the_model_is_a_choice_where_there_are_several(open_tab: Callable[..., Any], tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "pirate", pairs_for(EMBEDDED, 1))
    server = start_server(["--served-model-name", "own", "--lora-modules", f"pirate={adapter}"], tmp_path / "server.log")
    try:
        tab = open_tab(url=server.url + "/")
        tab.page.click("#settings-toggle")
        choices = tab.page.locator("#setting-model")
        assert choices.locator("option").all_inner_texts() == ["own", "pirate"] and choices.input_value() == "own"
        tab.ask(FILES)
        choices.select_option("pirate")
        assert tab.page.locator("#model").inner_text() == "pirate"
        tab.ask(FILES)
        assert [sent.get("model") for sent in tab.sent] == [None, "pirate"]
        assert tab.page.locator(".speaker").all_inner_texts()[-1] == "pirate"
        tab.page.reload()
        tab.until("document.getElementById('model').textContent === 'pirate'")
    finally:
        server.process.kill()
        server.process.wait()


def test_a_refusal_is_told_in_words_and_names_the_setting(open_tab: Callable[..., Any]) -> None:
    tab = open_tab({"temperature": "0", "top_p": "5"}, failures=True)
    tab.ask(FILES)
    told = tab.page.locator(".failure:visible").inner_text()
    assert "refused" in told and "top_p" in told and "settings" in told
    tab.page.click("#settings-toggle")
    tab.page.get_by_label("Top p").fill("1")
    tab.page.get_by_role("button", name="Regenerate the answer").click()
    tab.finished()
    assert tab.page.locator(".failure:visible").count() == 0 and tab.answer.inner_text()


def test_a_conversation_that_is_too_long_says_what_to_do(open_tab: Callable[..., Any]) -> None:
    tab = open_tab(failures=True)
    tab.ask("one two three " * 3000)
    told = tab.page.locator(".failure:visible").inner_text()
    assert "tokens" in told and "settings" not in told
    assert told.endswith("shorten the prompt. Start a new chat, or shorten the messages.")


@pytest.mark.parametrize(("status", "words"), [(429, "no more requests"), (503, "busy"), (500, "failed")])
def test_a_proxys_refusals_say_when_to_come_back(open_tab: Callable[..., Any], status: int, words: str) -> None:
    tab = open_tab(failures=True)
    error = json.dumps({"error": {"message": "slow down"}})
    tab.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, body=error, headers={"retry-after": "7"}))
    tab.ask(FILES)
    told = tab.page.locator(".failure:visible").inner_text()
    assert words in told and "slow down" in told and ("7 s" in told or status == 500)
    assert tab.page.locator(".message.user").inner_text().count(FILES) == 1, "what was typed is there"


def test_a_server_with_a_key_is_asked_for_it_and_the_tab_keeps_it(
    open_tab: Callable[..., Any], server_process: Callable[..., RunningServer]
) -> None:
    server = server_process("--api-key", "open-sesame")
    tab = open_tab(url=server.url + "/", failures=True)
    dialog = tab.page.get_by_role("dialog", name="API key")
    for wrong in ("wrong", "open\u2013sesame"):  # the latter, with a dash of a word processor, no request can carry
        dialog.get_by_label("Key").fill(wrong)
        dialog.get_by_role("button", name="Use this key").click()
        tab.page.wait_for_selector("#key-wrong:visible")
        assert "not the key" in tab.page.locator("#key-wrong").inner_text()
        tab.page.reload()
        tab.page.wait_for_selector("#key[open]")
        assert tab.page.locator("#key-wrong").is_hidden()
    dialog.get_by_role("button", name="Later").click()
    tab.page.fill("#prompt", FILES)
    tab.page.click("#race-open")
    dialog.get_by_label("Key").fill("open-sesame")
    dialog.get_by_label("Key").press("Enter")
    tab.until("document.getElementById('model').textContent === 'foretoken-demo'")
    assert dialog.is_hidden()
    tab.page.wait_for_selector("#race[data-state=done]")
    tab.page.keyboard.press("Escape")
    tab.ask(FILES)
    assert tab.answer.inner_text()
    assert "open-sesame" not in tab.page.evaluate("JSON.stringify(localStorage)")
    tab.page.reload()
    tab.until("document.getElementById('model').textContent === 'foretoken-demo'")


def test_a_server_that_dies_in_the_middle_loses_nothing(open_tab: Callable[..., Any], server_process: Callable[..., RunningServer]) -> None:
    server = server_process()
    tab = open_tab(url=server.url + "/", failures=True)
    tab.ask_for_much()
    server.process.kill()
    tab.finished()
    assert "broke off" in tab.page.locator(".failure:visible").inner_text()
    assert tab.answer.inner_text() and tab.stored()[-1]["answer"]["content"]
    tab.ask("Are you there?")
    told = tab.page.locator(".failure:visible").last.inner_text()
    assert "cannot be reached" in told and "foretoken serve" in told
    assert "Are you there?" in tab.page.locator(".message.user").last.inner_text()
    tab.page.click("#tab-metrics")
    tab.page.wait_for_selector("#metrics-failure:visible")
