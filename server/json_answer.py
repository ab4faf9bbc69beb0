"""JSON as the body of an answer: every route's, whether it tells of success or not."""

from typing import Any

from pydantic_core import to_json
from starlette.responses import Response


class JsonAnswer(Response):
    """Written by pydantic's encoder: of long lists, as of embeddings, in a tenth of the time that Python's own takes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)
