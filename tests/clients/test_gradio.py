"""A streaming chat page in a real browser: Gradio's, which talks to the server as an OpenAI endpoint."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")
sync_api: Any = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

APP = """
import sys, gradio
chat = gradio.load_chat(sys.argv[1], model=sys.argv[2], token=sys.argv[3])
_, url, _ = chat.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
print(url, flush=True)
sys.stdin.read()
"""
QUESTION = "Tell me a long story about a cat."
LENGTHS = """
window.lengths = new Set();
new MutationObserver(() => {
  const said = [...document.querySelectorAll("[data-testid=bot]")].at(-1);
  if (said) window.lengths.add(said.innerText.length);
}).observe(document.body, { childList: true, subtree: true, characterData: true });
"""


@pytest.fixture
def page_url(base_url: str, model_name: str, api_key: str, tmp_path: Path) -> Iterator[str]:
    script = tmp_path / "app.py"
    script.write_text(APP, encoding="utf-8")
    environment = os.environ | {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), base_url, model_name, api_key]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as app:
        assert app.stdout is not None and app.stdin is not None
        yield next(line for line in app.stdout if line.startswith("http")).strip()
        app.stdin.close()
        app.wait(20)


def test_a_question_typed_into_a_browser_is_answered_as_it_comes(page_url: str) -> None:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(page_url, wait_until="domcontentloaded")
        page.evaluate(LENGTHS)
        page.locator("textarea").first.fill(QUESTION)
        page.keyboard.press("Enter")
        said = page.locator("[data-testid=bot]").last
        sync_api.expect(said).to_contain_text(re.compile(r"\w"), timeout=90_000)
        page.wait_for_function("window.lengths.size > 2", timeout=60_000)  # it grows
        assert QUESTION in page.locator("[data-testid=user]").last.inner_text()
        browser.close()
