"""A browser, and pages of it on a real server of the embedded model. Every page must end without a word from its console."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer, start_server

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
GREEDY = {"temperature": "0"}
STORY = "Tell me a story."

WATCH = """
globalThis.violations = [];
addEventListener("securitypolicyviolation", (event) => violations.push(`${event.violatedDirective} ${event.blockedURI}`));
globalThis.streams = []; // the chat route's answers, as the server sent them
const asked = globalThis.fetch;
globalThis.fetch = async (address, options) => {
  const response = await asked(address, options);
  if (String(address).endsWith("/chat/completions")) response.clone().text().then((text) => streams.push(text), () => {});
  return response;
};
"""


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model with two proposers that guess in every step, whatever it costs: what is guessed is not left to the clock."""
    speculation = [{"method": method, "num_speculative_tokens": 4, "adaptive": False} for method in ("ngram", "draft_model")]
    flags = ["--root-path", "/name", "--speculative-config", json.dumps(speculation)]
    server = start_server(flags, tmp_path_factory.mktemp("page") / "server.log")
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture(scope="module")  # not longer: while it is open, no other test of this thread can run an event loop
def browser() -> Iterator[Any]:
    sync_api: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'foretoken[browser]'")
    if CHROMIUM is None:
        pytest.skip("there is no chromium: install one, or name it in CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Tab:
    """One page, in a browser of its own. What its console says and what its policy forbids is collected."""

    def __init__(self, browser: Any, url: str, settings: dict[str, str], **context: Any) -> None:
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 860}, "reduced_motion": "reduce"} | context))
        self.context.set_default_timeout(30_000)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        self.context.add_init_script(WATCH)
        kept = json.dumps(json.dumps(settings))
        self.context.add_init_script(f"localStorage.getItem('foretoken.settings') ?? localStorage.setItem('foretoken.settings', {kept})")
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.sent: list[dict[str, Any]] = []  # bodies for the chat route
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", self._note)
        self.url = url
        self.page.goto(url)

    def _note(self, request: Any) -> None:
        self.requests.append(request.url)
        if request.url.endswith("/chat/completions"):
            self.sent.append(json.loads(request.post_data))

    def ask(self, text: str) -> None:
        """Type it, send it, wait for the end of the answer."""
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        self.finished()

    def ask_for_much(self) -> None:
        """Like ask, but the answers go on to the length limit, and this one has only begun."""

        def longer(route: Any) -> None:
            route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True, "max_tokens": 1900}))

        self.page.route("**/v1/chat/completions", longer)
        self.page.fill("#prompt", STORY)
        self.page.press("#prompt", "Enter")
        self.page.wait_for_selector(".message.model:last-child .token")

    def finished(self) -> None:
        self.page.wait_for_selector(".message.model:last-child[aria-busy=false]")

    @property
    def answer(self) -> Any:
        """The last answer's body."""
        return self.page.locator(".message.model").last.locator(".body")

    def until(self, condition: str, timeout_s: float = 30.0) -> None:
        """Wait for an expression to be true. Playwright's own way to wait needs eval, which the page forbids."""
        deadline = time.monotonic() + timeout_s
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {condition}"
            self.page.wait_for_timeout(50)

    def stored(self) -> list[dict[str, Any]]:
        """The messages of the chat that was written last, as the browser keeps them."""
        texts = self.page.evaluate("Object.entries(localStorage).filter(([k]) => k.startsWith('foretoken.chat.')).map(([, v]) => v)")
        return max((json.loads(text) for text in texts), key=lambda chat: chat["updated"])["messages"]

    def stream(self) -> list[dict[str, Any]]:
        """The chunks of the last stream, as the server sent them."""
        self.until("streams.at(-1)?.includes('[DONE]')")
        lines = self.page.evaluate("streams.at(-1)").split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def check(self) -> None:
        assert self.page.evaluate("violations") == []
        others = [url for url in self.requests if not url.startswith((self.url, "blob:"))]
        assert not others, f"it asked others: {others}"


@pytest.fixture
def open_tab(browser: Any, demo_server: RunningServer) -> Iterator[Callable[..., Tab]]:
    """`open_tab(settings, viewport=..., color_scheme=...)`; `failures=True` if the console may tell of failed requests."""
    tabs: list[tuple[Tab, bool]] = []

    def open_one(settings: dict[str, str] | None = None, url: str | None = None, failures: bool = False, **context: Any) -> Tab:
        tabs.append((Tab(browser, url or demo_server.url + "/", GREEDY if settings is None else settings, **context), failures))
        return tabs[-1][0]

    yield open_one
    for tab, failures in tabs:
        tab.check()
        said = [line for line in tab.said if not (failures and "Failed to load resource" in line)]
        tab.context.close()
        assert said == []


@pytest.fixture
def tab(open_tab: Callable[..., Tab]) -> Tab:
    return open_tab()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)
