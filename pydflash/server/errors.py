"""What a client is told when something fails: status, type and text, in llama.cpp's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydflash.errors import CapacityError, InvalidArgumentError, PydflashError

_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
# Class of an exception in this process or the engine's -> status. What is not here is our fault: 500.
_STATUS_OF: Final[Mapping[str, int]] = {
    "InvalidArgumentError": 400,
    "ChatTemplateError": 400,
    "CapacityError": 400,
    "SnapshotMismatchError": 400,
    "NotFoundError": 400,
    "FormatError": 400,
    "UnsupportedModelError": 501,
    "BusyError": 503,
    "OutOfMemoryError": 503,
    "ClosedError": 503,
}


class ApiError(PydflashError):
    """An answer that is an error.

    Attributes:
        code: HTTP status.
        kind: llama.cpp's name of the error's type.
        extra: further entries of the error object.
        retry_after: seconds for the Retry-After header; None: no header.
    """

    def __init__(
        self,
        code: int,
        message: str,
        *,
        kind: str | None = None,
        extra: Mapping[str, object] | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.kind = _TYPES.get(code, "server_error") if kind is None else kind
        self.extra = dict(extra or {})
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, object]:
        """The body that llama.cpp and OpenAI clients read."""
        return {"error": {"code": self.code, "message": self.message, "type": self.kind, **self.extra}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers besides the usual ones."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def refuse(field: str, value: object, limit: str) -> ApiError:
    """400: a field is outside its limits."""
    return ApiError(400, InvalidArgumentError(field, value, limit).message)


def context_exceeded(n_prompt: int, n_ctx: int) -> ApiError:
    """400: the prompt leaves no room for an answer."""
    return ApiError(
        400,
        f"the request exceeds the available context size: {n_prompt} prompt tokens, and a slot takes {n_ctx}",
        kind="exceed_context_size_error",
        extra={"n_prompt_tokens": n_prompt, "n_ctx": n_ctx},
    )


def loading() -> ApiError:
    """503: the engine is not there yet, or not there again."""
    return ApiError(503, "Loading model", retry_after=1)


def engine_lost() -> ApiError:
    """503: the engine's process ended while it worked on the request."""
    return ApiError(
        503, "the engine's process ended while it worked on this request; it is started again", retry_after=1
    )


def from_failure(error: str, message: str) -> ApiError:
    """A failure in the engine's process, by the class of its exception."""
    return ApiError(_STATUS_OF.get(error, 500), message)


def from_exception(error: Exception) -> ApiError:
    """An exception of this process; the text of one that is no PydflashError stays in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CapacityError) and error.needed is not None and error.available is not None:
        return context_exceeded(error.needed - 1, error.available)
    if isinstance(error, PydflashError):
        return from_failure(type(error).__name__, error.message)
    return ApiError(500, "internal error: see the server's log")
