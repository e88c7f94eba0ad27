# SPDX-License-Identifier: Apache-2.0
"""Errors in the form of the OpenAI API."""

from __future__ import annotations

import json
from collections.abc import Mapping

__all__ = ["ApiError"]


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: The HTTP status, which is the ``code`` too.
        message: For people.
        kind: The ``type``.
        param: The field of the request that is wrong, or None.
        headers: Headers of the answer besides those that follow from the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self._headers = dict(headers or {})

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        found = {"Content-Type": "application/json", **self._headers}
        if self.status in (429, 503):
            found["Retry-After"] = "1"
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found

    def json(self) -> str:
        """Return the answer; in ASCII, since a message may quote what is no valid text."""
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return json.dumps({"error": error})
