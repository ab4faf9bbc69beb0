"""The page for everyone: by keyboard alone, on a narrow phone, in the dark, with little contrast to spare."""

from collections.abc import Callable
from typing import Any

import pytest

FUNCTION = "Write a Python function that adds up a list."

CONTRAST = """(...colours) => {
  const luminance = (text) => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / (text.startsWith("color(") ? 1 : 255));
    const [r, g, b] = parts.map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [dark, bright] = colours.map(luminance).sort((x, y) => x - y);
  return (bright + 0.05) / (dark + 0.05);
}"""
CONTRASTS = f"""() => {{
  const contrast = {CONTRAST};""" + """
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if ((colour.match(/[\\d.]+/g)[3] ?? "1") === "1") return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest(".visually-hidden, noscript, :disabled")) continue;
    found.push([contrast(getComputedStyle(element).color, behind(element)), walker.currentNode.data.trim()]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(open_tab: Callable[..., Any], scheme: str) -> None:
    tab = open_tab(color_scheme=scheme)
    checked = []

    def check() -> None:
        found = tab.page.evaluate(CONTRASTS)
        assert not [entry for entry in found if entry[0] < 4.5]
        checked.extend(found)

    check()
    tab.ask(FUNCTION)
    tab.page.click("#settings-toggle")
    tab.page.locator(".tokens .token:not(.of-target)").first.hover()
    check()
    tab.page.click("#race-open")
    tab.page.wait_for_selector("#race[data-state=done]")
    check()
    tab.page.keyboard.press("Escape")
    tab.page.click("#tab-metrics")
    tab.page.wait_for_selector("#proposers tr")
    check()
    assert len(checked) > 150


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_six_proposers_can_be_told_apart(open_tab: Callable[..., Any], scheme: str) -> None:
    """Tints keep the text readable, lines reach 3:1 against the page; no two share both colour and kind of line."""
    tab = open_tab(color_scheme=scheme)
    script = f"""() => [...Array(6).keys()].map((i) => {{
      const swatch = document.createElement("span");
      swatch.className = `swatch token of-${{i}}`;
      document.getElementById("legend").append(swatch);
      const {{ color, backgroundColor: tint, borderBottomColor: line, borderBottomStyle, borderBottomWidth }} = getComputedStyle(swatch);
      const page = getComputedStyle(document.body).backgroundColor;
      return [({CONTRAST})(color, tint), ({CONTRAST})(line, page), line, borderBottomStyle + borderBottomWidth];
    }})"""
    looks = tab.page.evaluate(script)
    assert all(text >= 4.5 and line >= 3 for text, line, _, _ in looks)
    assert len({line for _, _, line, _ in looks}) == 6 and len({kind for _, _, _, kind in looks}) == 6


def test_forced_colours_show_what_is_chosen_and_measured(open_tab: Callable[..., Any]) -> None:
    tab = open_tab(forced_colors="active")
    tab.ask(FUNCTION)
    for shown, other in (("#tab-chat", "#tab-metrics"), (".chat-title", "#new-chat"), (".position i", "body"), ("#rate-with-bar", "body")):
        colours = [tab.page.locator(one).first.evaluate("el => getComputedStyle(el).backgroundColor") for one in (shown, other)]
        assert colours[0] != colours[1], shown


def test_the_theme_can_be_chosen_and_is_kept(open_tab: Callable[..., Any]) -> None:
    tab = open_tab(color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = tab.page.evaluate(background)
    tab.page.click("#theme")  # system -> light
    assert tab.page.evaluate(background) == light
    tab.page.click("#theme")
    dark = tab.page.evaluate(background)
    assert dark != light and "dark" in tab.page.locator("#theme").get_attribute("aria-label")
    tab.page.reload()
    assert tab.page.evaluate(background) == dark
    tab.page.click("#theme")
    assert tab.page.evaluate(background) == light
    tab.page.emulate_media(color_scheme="dark")
    assert tab.page.evaluate(background) == dark


def test_everything_works_without_a_pointer(tab: Any) -> None:
    page = tab.page
    page.evaluate("localStorage.setItem('foretoken.formatted', 'no')")  # every token has a place of its own then
    page.reload()
    focused = "document.activeElement"
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.textContent") == "Skip to the message box"
    page.keyboard.press("Enter")
    assert page.evaluate(f"{focused}.id") == "prompt"
    page.keyboard.type(FUNCTION)
    page.keyboard.press("Enter")
    tab.finished()
    assert page.evaluate(f"{focused}.id") == "prompt", "the focus stays where one writes"
    reach(page, "el => el.matches('.message.model .token')", "Shift+Tab")
    told = page.locator("#token-tip")
    assert told.is_visible() and page.evaluate(f"{focused}.getAttribute('aria-describedby')") == "token-tip"
    first = page.evaluate(f"{focused}.dataset.index")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(f"{focused}.dataset.index") == str(int(first) + 1) and told.is_visible()
    page.keyboard.press("End")
    assert page.evaluate(f"{focused} === [...document.querySelectorAll('.body .token')].at(-1)")
    page.keyboard.press("Escape")
    assert told.is_hidden()
    reach(page, "el => el.textContent === 'Edit'", "Shift+Tab")
    page.keyboard.press("Enter")
    assert page.evaluate(f"{focused}.className") == "edit-box"
    page.keyboard.press("Escape")
    assert page.evaluate(f"{focused}.textContent") == "Edit"
    reach(page, "el => el.id === 'settings-toggle'", "Shift+Tab")
    page.keyboard.press("Enter")
    assert page.evaluate(f"{focused}.id") == "setting-system"
    page.keyboard.press("Escape")
    assert page.evaluate(f"{focused}.id") == "settings-toggle"
    reach(page, "el => el.id === 'tab-chat'", "Shift+Tab")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(f"{focused}.id") == "tab-metrics" and page.locator("#view-metrics").get_by_role("main").is_visible()
    page.keyboard.press("ArrowLeft")
    reach(page, "el => el.id === 'race-open'", "Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#race[data-state=done]")
    page.keyboard.press("Escape")
    assert page.locator("#race").is_hidden() and page.evaluate(f"{focused}.id") == "race-open"


def reach(page: Any, wanted: str, key: str) -> None:
    """Press the key until what has the focus is what is wanted; each stop on the way must be seen."""
    for _ in range(60):
        page.keyboard.press(key)
        if page.evaluate(f"({wanted})(document.activeElement)"):
            return
        style = page.evaluate("(({outlineStyle, top}) => [outlineStyle, top])(getComputedStyle(document.activeElement))")
        stop = page.evaluate("document.activeElement.outerHTML.slice(0, 80)")
        assert style[0] != "none" or 'class="token' in stop or stop.startswith("<body"), f"no visible focus on {stop}"
    raise AssertionError(f"{key} never comes to {wanted}")


def test_every_control_has_a_name(tab: Any) -> None:
    tab.ask(FUNCTION)
    tab.page.click("#settings-toggle")
    nameless = tab.page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, a[href], [role=img], [role=group], aside, dialog")]
          .filter((el) => !(el.textContent.trim() && el.matches("button, a")) && !el.ariaLabel && !el.labels?.length
            && !document.getElementById(el.getAttribute("aria-labelledby"))?.textContent)
          .map((el) => el.outerHTML.slice(0, 100))"""
    )
    assert nameless == []


def test_a_narrow_phone_needs_no_sideways_scrolling(open_tab: Callable[..., Any]) -> None:
    tab = open_tab({"temperature": "0", "max_tokens": "60"}, viewport={"width": 360, "height": 740}, has_touch=True)

    def check() -> None:
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
        outside = tab.page.evaluate(
            """() => [...document.querySelectorAll("body *")]
              .filter((el) => el.checkVisibility() && el.getBoundingClientRect().right > 360.5)
              .filter((el) => !el.closest("pre, .wide, .visually-hidden"))
              .map((el) => el.outerHTML.slice(0, 100))"""
        )
        assert outside == []

    check()
    tab.page.wait_for_selector(".example")
    tab.page.click("#chats-toggle")
    tab.page.click("#new-chat")
    assert tab.page.evaluate("document.getElementById('scroller').scrollTop") == 0, "a first visit begins at the top"
    tab.page.fill("#prompt", "One line,")
    tab.page.press("#prompt", "Enter")  # such a keyboard has no Shift+Enter
    tab.page.keyboard.type("and another.")
    tab.page.tap("#send")
    tab.finished()
    assert tab.stored()[0]["content"] == "One line,\nand another."
    assert tab.page.evaluate("document.activeElement.id") != "prompt", "the keyboard goes, and the answer is seen"
    check()
    for drawer in ("chats", "settings"):
        tab.page.click(f"#{drawer}-toggle")
        assert tab.page.locator(f"#{drawer}").is_visible()
        check()
        tab.page.click(f"#{drawer}-toggle")
    tab.page.click("#race-open")
    tab.page.wait_for_selector("#race[data-state=done]")
    check()
    tab.page.get_by_role("button", name="Close the race").click()
    tab.page.click("#tab-metrics")
    tab.page.wait_for_selector("#proposers tr")
    check()


def test_a_low_window_leaves_room_for_the_conversation(open_tab: Callable[..., Any]) -> None:
    """A phone on its side, a page that was made two or four times as large."""
    for width, height in ((740, 340), (320, 256), (1024, 560)):
        tab = open_tab(viewport={"width": width, "height": height})
        tab.ask(FUNCTION)
        room = tab.page.evaluate("document.getElementById('scroller').clientHeight")
        assert room >= 0.3 * height, (width, height, room)
        for control in ("#prompt", "#send", "#race-open", "#coloured"):
            box = tab.page.locator(control).bounding_box()
            assert box["y"] + box["height"] <= height and box["x"] + box["width"] <= width, control
        tab.page.click("#race-open")
        tab.page.wait_for_selector("#race[data-state=done]")
        bottoms = tab.page.locator(".lane .body").evaluate_all("all => all.map((el) => el.getBoundingClientRect().bottom)")
        assert max(bottoms) <= tab.page.locator(".verdict").bounding_box()["y"], "no text is over another"


def test_escape_stops_an_answer_wherever_the_focus_is(tab: Any) -> None:
    tab.ask_for_much()
    tab.page.evaluate("document.activeElement.blur()")
    tab.page.keyboard.press("Escape")
    tab.finished()
    tab.page.get_by_role("button", name="Regenerate the answer").press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "prompt", "the button is gone, and somebody came by keyboard"
    tab.page.wait_for_selector(".message.model .token")
    tab.page.get_by_role("button", name="Edit your message and ask again").click()
    tab.page.keyboard.press("Escape")
    assert tab.page.locator(".message.model[aria-busy=true]").count() == 1, "it left the edit"
    tab.page.keyboard.press("Escape")
    tab.finished()


def test_the_list_of_chats_keeps_the_focus_while_it_changes(tab: Any) -> None:
    tab.ask(FUNCTION)
    tab.page.click("#new-chat")
    tab.ask_for_much()
    tab.page.get_by_role("button", name=FUNCTION, exact=True).focus()
    tab.page.evaluate("document.getElementById('send').click()")  # as if the answer came to its end: the focus stays
    tab.finished()
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.ariaLabel") == f"Delete {FUNCTION}"
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("document.activeElement.className") == "chat-title", "at the chat that took its place"


def test_text_from_right_to_left_begins_at_the_right(tab: Any) -> None:
    arabic = "\u0645\u0631\u062d\u0628\u0627 (1)!"
    tab.page.fill("#prompt", arabic)
    assert tab.page.evaluate("getComputedStyle(document.getElementById('prompt')).direction") == "rtl"
    answer = {"content": f"{arabic}\n\n- {arabic}\n\nHello.\n\n```\nx = 1\n```"}
    messages = [{"role": "user", "content": arabic}, {"role": "assistant", "model": "", "answer": answer}]
    tab.page.evaluate("chat => localStorage.setItem('foretoken.chat.rtl', JSON.stringify(chat))", {"messages": messages, "updated": 1})
    tab.page.reload()
    directions = tab.page.locator(".said p, .message.model :is(p, ul, pre):not(.facts, .waiting)")
    shown = directions.evaluate_all("all => all.map((el) => el.localName + ' ' + getComputedStyle(el).direction)")
    assert shown == ["p rtl", "p rtl", "ul rtl", "p ltr", "pre ltr"]


@pytest.mark.parametrize(("path", "strips"), [("name", True), ("name/", True), ("name", False), ("name/", False)])
def test_a_proxy_may_have_the_page_at_a_name_of_its_own(open_tab: Callable[..., Any], path: str, strips: bool) -> None:
    tab = open_tab()
    below = f"{tab.url}name"

    def passed_on(route: Any) -> None:
        route.fulfill(response=route.fetch(url=tab.url + route.request.url.removeprefix(below).removeprefix("/")))

    if strips:  # else the server is asked as the browser asks
        tab.page.route(lambda url: url.startswith(below), passed_on)
    tab.page.goto(tab.url + path)
    tab.ask(FUNCTION)
    assert tab.page.url == below + "/"
    assert f"{below}/v1/chat/completions" in tab.requests and f"{below}/page/main.js" in tab.requests
