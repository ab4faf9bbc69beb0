"""A question, and the form of its answer."""

from typing import Any, Literal

from pydantic import BaseModel, Field

ASKED = "What is the capital of France?"
QUESTION: Any = [{"role": "user", "content": ASKED}]


class Capital(BaseModel):
    city: str = Field(max_length=20)
    size: Literal["small", "large"]
