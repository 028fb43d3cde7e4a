"""The one shape in which programs are told what went wrong."""

from __future__ import annotations

from pydantic import BaseModel, Field

__all__ = ["CODES", "ErrorBody", "ErrorDetail", "RefusedError"]

#: What a status stands for, in a word.
CODES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "too_large",
    415: "unsupported_media_type",
    421: "unknown_host",
    422: "invalid",
    500: "internal_error",
    503: "unavailable",
}


class ErrorDetail(BaseModel):
    """What went wrong.

    Attributes
    ----------
    code
        A word for it.
    message
        What it is, ending in the remedy.
    problems
        Each of several problems; empty if there is one.
    """

    code: str
    message: str
    problems: list[str] = Field(default_factory=list)


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class RefusedError(Exception):
    """A request that is not carried out.

    Attributes
    ----------
    status
        The HTTP status.
    message
        Why, ending in the remedy.
    problems
        Each of several problems.
    """

    def __init__(self, status: int, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.problems = problems

    def body(self) -> dict[str, object]:
        """As JSON."""
        code = CODES.get(self.status, "error")
        detail = ErrorDetail(code=code, message=self.message, problems=list(self.problems))
        return ErrorBody(error=detail).model_dump()
