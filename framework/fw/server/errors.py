"""What goes wrong with a request, in OpenAI's shape (https://platform.openai.com/docs/guides/error-codes)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fw.errors import FwError

_LONGEST = 1000
"""Characters of a message: no more of a request is repeated."""


class ApiError(FwError):
    """A request cannot be answered.

    Args:
        status: of HTTP.
        code: a word for programs.
        param: the field that is wrong.
        retry_after: seconds after which it may go better.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(shown(message, _LONGEST))
        self.status, self.code, self.param, self.retry_after = status, code, param and shown(param), retry_after

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """That go with it."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 408:  # which OpenAI's clients would ask for again by themselves, to take as long
            headers["X-Should-Retry"] = "false"
        return {**headers, "WWW-Authenticate": "Bearer"} if self.status == 401 else headers


_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    507: "server_error",
}


def shown(name: str, most: int = 80) -> str:
    """As much of what a client has written as a message repeats."""
    return name if len(name) <= most else f"{name[:most]}…"


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Of what was asked for."""
    return ApiError(400, message, code, param)


def not_found(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """There is no such thing."""
    return ApiError(404, message, code, param)
