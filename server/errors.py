"""Errors as the client sees them: OpenAI's one shape, and the one table from the engine's errors to HTTP."""

from collections.abc import Mapping
from typing import Any

from ..engine.errors import EngineDead, ForetokenError, InvalidRequest, QueueFull, RequestFailed, ShuttingDown
from .json_answer import JsonAnswer

INTERNAL_MESSAGE = "The server had an error while processing your request."


class ApiError(Exception):
    """An answer that is an error. `message` says what to change; for 5xx it is constant text, never an exception's."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JsonAnswer:
        return JsonAnswer(self.body, self.status, headers=self.headers)


def unsupported(param: str, what: str | None = None, instead: str | None = None) -> ApiError:
    """A parameter we know, cannot serve and will not silently ignore. instead: what to send for it."""
    advice = "leave it out" if instead is None else f"send {instead}"
    return ApiError(400, f"{what or param} is not supported by this server; {advice}", param=param, code="unsupported_parameter")


def internal_error(request_id: str | None = None) -> ApiError:
    label = f" Request id: {request_id}." if request_id else ""
    return ApiError(500, INTERNAL_MESSAGE + label, type="server_error", code="internal_error")


_FAILED_STATUS = {"timeout": 504, "invalid_parameters": 400}  # the rest, numerical_error and engine_error, are 500


def from_engine(error: ForetokenError) -> ApiError:
    """The one table from engine/errors.py to HTTP."""
    match error:
        case InvalidRequest():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case QueueFull():
            headers = {"Retry-After": str(error.retry_after_s)}
            return ApiError(503, str(error), type="service_unavailable_error", code="server_is_overloaded", headers=headers)
        case ShuttingDown() | RequestFailed(code="server_shutdown"):
            headers = {"Retry-After": "1", "Connection": "close"}
            return ApiError(503, str(error), type="service_unavailable_error", code="server_shutdown", headers=headers)
        case RequestFailed():
            status = _FAILED_STATUS.get(error.code, 500)
            kind = "server_error" if status >= 500 else "invalid_request_error"
            return ApiError(status, str(error), type=kind, code=error.code)
        case EngineDead():
            return ApiError(503, "The engine has stopped.", type="service_unavailable_error", code="engine_dead")
        case _:
            return internal_error()
