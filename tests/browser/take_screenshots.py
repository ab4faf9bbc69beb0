"""The pictures of docs/page.md, taken anew: `python tests/browser/take_screenshots.py [URL]`.

URL: a server that has answered little so far; without one, one is started with the embedded model, guessing in every step.
"""

import io
import json
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parent.parent.parent
IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 50_000
NUM_COLORS = 16
FUNCTION = "Write a Python function that adds up a list."
EDIT = "Rename the variable `total` to `amount`. Answer with the whole changed code and nothing else.\n\n```\n{code}\n```"
CODE = "def total_price(items):\n    total = 0\n    for item in items:\n        total += item.price * item.quantity\n    return total"
LOAD = [FUNCTION, "Tell me a short story about a lighthouse.", "How do I find large files on Linux?", "What is 48 plus 24?"]


def main() -> None:
    if len(sys.argv) > 1:
        take(sys.argv[1].rstrip("/") + "/")
        return
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from running_server import start_server

    speculation = [{"method": method, "num_speculative_tokens": 5, "adaptive": False} for method in ("ngram", "draft_model")]
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(["--speculative-config", json.dumps(speculation)], Path(folder) / "server.log")
        try:
            take(server.url + "/")
        finally:
            server.stop()


def take(url: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])

        def opened(**look: Any) -> Any:
            usual = {"viewport": {"width": 1200, "height": 800}, "color_scheme": "light", "reduced_motion": "reduce"}
            context = chromium.new_context(**(usual | look))
            context.add_init_script("localStorage.setItem('foretoken.settings', '{\"temperature\":\"0\"}')")
            page = context.new_page()
            page.goto(url)
            page.wait_for_timeout(1000)
            return page

        page = opened()
        ask(page, EDIT.format(code=CODE))
        page.click("#race-open")  # so that the strip has both speeds
        page.wait_for_selector("#race[data-state=done]", timeout=120_000)
        page.click("#race-close")
        page.locator(".message .token:not(.of-target)").nth(18).hover()
        page.wait_for_timeout(300)
        keep(page, "light", clip={"x": 256, "y": 226, "width": 944, "height": 574})
        page = opened()
        page.fill("#prompt", EDIT.format(code=CODE))
        page.emulate_media(reduced_motion="no-preference")
        page.click("#race-open")
        page.wait_for_selector("#race[data-state=replaying]", timeout=120_000)
        page.wait_for_timeout(3_500)
        keep(page.locator("#race"), "race")
        page = opened(viewport={"width": 1200, "height": 470})
        page.click("#tab-metrics")
        with_load(page, url)
        chromium.close()


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.model[aria-busy=false]")
    page.wait_for_timeout(500)


def with_load(page: Any, url: str) -> None:
    """The metrics after two minutes of three clients that ask, wait a little and ask again."""
    stop = threading.Event()

    def client(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as http:
            turn = number
            while not stop.wait(0.2 * (number + turn % 4)):
                turn += 1
                messages = [{"role": "user", "content": LOAD[turn % len(LOAD)]}]
                http.post("v1/chat/completions", json={"messages": messages, "max_tokens": 200, "seed": turn})

    clients = [threading.Thread(target=client, args=(number,)) for number in range(1, 4)]
    for thread in clients:
        thread.start()
    page.wait_for_timeout(118_000)
    keep(page, "metrics", clip={"x": 0, "y": 206, "width": 1200, "height": 264})
    stop.set()
    for thread in clients:
        thread.join()


def keep(part: Any, name: str, **how: Any) -> None:
    path = IMAGES / f"page-{name}.webp"
    picture = Image.open(io.BytesIO(part.screenshot(**how)))
    picture.convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE).save(path, lossless=True)
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}  {size:,} bytes")
    assert size < MAX_BYTES, f"{path} is too large"


if __name__ == "__main__":
    main()
