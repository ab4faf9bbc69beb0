"""The two kinds of JSON objects in a request: OpenAI's, which may hold keys that nobody knows, and our own, which may not."""

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class OpenAIObject(BaseModel):
    """Keys nobody declared are kept in model_extra, for extras.py to judge."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class OurObject(BaseModel):
    """Keys nobody declared are refused, with those there are."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        known = cls.model_fields
        if isinstance(value, dict) and (unknown := next((key for key in value if key not in known), None)) is not None:
            told = {"key": repr(unknown)[:60], "known": ", ".join(known)}
            raise PydanticCustomError("unknown_key", "there is no key {key}; known are {known}", told)
        return value
