"""The two kinds of JSON objects in a request: OpenAI's, which may hold keys that nobody knows, and our own, which may not."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class OpenAIObject(BaseModel):
    """Keys nobody declared are kept in model_extra, for extras.py to judge."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class OurObject(BaseModel):
    """Keys nobody declared are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
