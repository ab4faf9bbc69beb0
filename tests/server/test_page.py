"""The page's files: routes, headers, keys, caching, and that they ask nobody else for anything."""

import base64
import hashlib
import logging
import re
import tomllib
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from foretoken.server.page import INLINE, MEDIA_TYPES, PAGE_FILES, STATIC

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = sorted(STATIC.glob("*.js"))


@pytest.mark.parametrize("address", PAGE_FILES)
def test_every_file_has_its_type_and_the_headers_that_keep_the_page_to_itself(client: TestClient, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 200
    assert answer.content == PAGE_FILES[address].read_bytes()
    assert answer.headers["content-type"] == MEDIA_TYPES[PAGE_FILES[address].suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    policy = dict(directive.split(" ", 1) for directive in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["style-src"] == policy["connect-src"] == policy["img-src"] == "'self'"
    inline = base64.b64encode(hashlib.sha256(INLINE).digest()).decode()
    assert policy["script-src"] == f"'self' 'sha256-{inline}'" and b"location.pathname" in INLINE
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in answer.headers["content-security-policy"] and "*" not in answer.headers["content-security-policy"]


def test_a_file_that_the_browser_has_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f'W/{tag}, "another"'):
        again = client.get("/page/main.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get("/page/main.js", headers={"If-None-Match": '"another"'}).status_code == 200


def test_a_visit_is_one_line_of_the_log(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "foretoken.request"):
        for address in PAGE_FILES:
            client.get(address)
        client.get("/page/nothing.js")
    said = [part for record in caplog.records for part in record.getMessage().split() if part.startswith(("route=", "status="))]
    assert said == ["route=/", "status=200", "route=other", "status=404"]


def test_head_answers_like_get_without_the_body(client: TestClient) -> None:
    answer = client.head("/")
    assert answer.status_code == 200 and not answer.content
    assert int(answer.headers["content-length"]) == len((STATIC / "index.html").read_bytes())


def test_only_the_pages_own_files_can_be_asked_for(client: TestClient) -> None:
    for path in ("/page/", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fpage.py", "/static/main.js"):
        assert client.get(path).status_code == 404, path
    assert client.post("/").status_code == 405


def test_the_page_needs_no_key_and_the_api_does(fake: FakeEngine) -> None:
    client = fake.client(api_keys=("secret",))
    for address in PAGE_FILES:
        assert client.get(address).status_code == 200, address
    assert client.get("/v1/models").status_code == 401
    assert client.get("/page/nothing.js").status_code == 401  # default deny, as for every path that is not listed


def test_the_files_name_no_other_host() -> None:
    for path in PAGE_FILES.values():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        hosts = re.findall(r"(?:https?:|wss?:)?//[a-z0-9-]+\.[a-z]", text)
        assert not hosts, f"{path.name}: {hosts}"
        assert "@import" not in text and "url(" not in text, path.name


def test_scripts_make_no_markup_or_code_from_strings() -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|createContextualFragment|setHTML|srcdoc"
    assert len(SCRIPTS) > 10
    for path in SCRIPTS:
        assert not re.search(forbidden, path.read_text(encoding="utf-8")), path.name


def test_the_markup_has_no_inline_style_and_one_inline_script() -> None:
    """Which is run before any file can be found: behind a proxy at /name it adds the slash that the files are behind."""
    markup = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\son[a-z]+=|\sstyle=|<style|javascript:", markup)
    assert [tag for tag in re.findall(r"<script[^>]*>", markup) if "src=" not in tag] == ["<script>"]
    assert markup.index(INLINE.decode()) < min(markup.index('"page/'), markup.index("<link"))


def test_what_the_files_refer_to_exists() -> None:
    markup = (STATIC / "index.html").read_text(encoding="utf-8")
    ids = set(re.findall(r'\sid="([^"]+)"', markup))
    assert len(ids) == len(re.findall(r'\sid="', markup)), "an id twice"
    referred = set(re.findall(r'(?:for|aria-controls|aria-labelledby)="([^"]+)"|href="#([^"]+)"', markup))
    assert {a or b for a, b in referred} <= ids
    for name in re.findall(r'(?:src|href)="page/([^"]+)"', markup):
        assert (STATIC / name).exists(), name
    for path in SCRIPTS:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert (STATIC / name).exists(), f"{path.name} imports {name}"
        unknown = set(re.findall(r'byId\("([^"]+)"\)', text)) - ids
        assert not unknown, f"{path.name}: {unknown}"


def test_the_package_carries_the_files() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    carried = {path for pattern in data["foretoken.server"] for path in (ROOT / "server").glob(pattern)}
    assert set(PAGE_FILES.values()) <= carried
    assert {path for path in STATIC.iterdir() if path.is_file()} == set(PAGE_FILES.values()), "a file that is never served"
