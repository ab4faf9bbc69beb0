"""Everything that can go wrong for a caller, as one tree. server/app.py turns it into HTTP with one table."""


class ForetokenError(Exception):
    """Base of all errors that a caller can act on. The message says what to change."""


class ConfigError(ForetokenError):
    """The server or engine was started with settings that cannot work."""


class ModelLoadError(ConfigError):
    """A model folder is missing, incomplete, damaged or of a kind that cannot be served."""


class InvalidRequest(ForetokenError, ValueError):
    """A request that cannot be served as asked."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextTooLong(InvalidRequest):
    """Prompt, or prompt and max_tokens, do not fit the context or the cache."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")


class InvalidGrammar(InvalidRequest):
    """The form that a request wants its output to have is not valid, too large, or cannot be enforced."""


class QueueFull(ForetokenError):
    """The bounded queue has no place; try again after retry_after_s."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(ForetokenError):
    """The server drains; no new work is taken."""


class RequestFailed(ForetokenError):
    """An accepted request ended in an error. `code` is numerical_error, engine_error, server_shutdown or timeout, which are ours, or
    invalid_parameters: what it asked for turned out on the way to be impossible, as a grammar that nothing can follow."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class EngineDead(ForetokenError):
    """The engine thread has ended; only a restart helps."""
