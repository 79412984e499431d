"""What a request is refused for, as the client is told."""

from __future__ import annotations


class RefusedError(Exception):
    """A request that is answered with an error object.

    Attributes:
        status: of HTTP.
        param: the field at fault; None: none alone.
        code: a word for programs, as OpenAI has them; None: none.
        retry_after: seconds after which the same request may be answered; None: never.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after
