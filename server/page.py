"""The chat page at `/`: the files of static/, their headers, and the addresses that need no key.

The files are public and say nothing of the server; what the page asks the API for goes through the same door as any client's.
They are read once, so that a request can name nothing but one of them.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

if TYPE_CHECKING:  # the command line reads this file's addresses, and is quick
    from fastapi import FastAPI

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INLINE = (STATIC / "index.html").read_bytes().partition(b"<script>")[2].partition(b"</script>")[0]
# Only our own files and our own API; no script, style or markup can come out of a string, whatever a model says.
POLICY = {
    "default-src": "'none'",
    "script-src": f"'self' 'sha256-{base64.b64encode(hashlib.sha256(INLINE).digest()).decode()}'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{directive} {sources}" for directive, sources in POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, and asked for again: after an upgrade nobody runs half of the page before
}


@dataclass(frozen=True)
class StaticFile:
    """One file of the page, in memory."""

    content: bytes
    headers: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> StaticFile:
        content = path.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, HEADERS | {"ETag": tag, "Content-Type": MEDIA_TYPES[path.suffix]})

    def response(self, known_tags: str) -> Response:
        """known_tags: the request's If-None-Match. A copy that the browser has is not sent again."""
        tags = {tag.strip().removeprefix("W/") for tag in known_tags.split(",")}
        if self.headers["ETag"] in tags:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def _address(path: Path) -> str:
    return "/" if path.name == "index.html" else f"/page/{path.name}"


PAGE_FILES = {_address(path): path for path in sorted(STATIC.iterdir()) if path.suffix in MEDIA_TYPES}
"""By address. All of them may be fetched without a key."""


def add_page(app: FastAPI) -> None:
    """The page's routes, one for each file."""
    for address, path in PAGE_FILES.items():
        _add_file(app, address, StaticFile.read(path))


def _add_file(app: FastAPI, address: str, file: StaticFile) -> None:
    @app.api_route(address, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
    async def static_file(request: Request) -> Response:
        return file.response(request.headers.get("if-none-match", ""))
