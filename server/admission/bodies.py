"""From the bytes of a request to its checked body, with nothing long on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic_core
from starlette.requests import ClientDisconnect, Request

from server.admission.account import Budget, Share
from server.admission.lanes import Lanes
from server.base.counting import num_values
from server.base.errors import ApiError
from server.base.limits import SMALL_BODY_BYTES, Limits, Patience
from server.base.record import current_record
from ssd.errors import RequestError

T = TypeVar("T")


class BodyReader:
    """Reads the bodies of all requests; those that are not small share a budget of memory and a thread."""

    def __init__(self, limits: Limits, lanes: Lanes) -> None:
        self._limits, self._lanes = limits, lanes
        most = max(limits.max_bodies_bytes, limits.max_body_bytes)
        self._memory = Budget(most, "large bodies")

    async def read(self, request: Request, check: Callable[[Any], T], *, max_values: int) -> T:
        """What ``check`` makes of the decoded body, whatever its content type.

        ``max_values`` : most of `json_size.num_values`. Raises RequestError; ApiError 413 for a body that is too long
        or says so, 408 for one that does not arrive; QueueFull where too many large ones are here.
        """
        share = self._memory.share()
        try:
            content = await self._receive(request, share)
            if len(content) <= SMALL_BODY_BYTES:
                return check(_decode(content))
            return await self._lanes.body(len(content)).run(_decode_large, content, check, max_values)
        finally:
            share.give_back()

    async def _receive(self, request: Request, share: Share) -> bytes:
        most = self._limits.max_body_bytes
        said = request.headers.get("content-length", "")
        if said.isascii() and said.isdecimal() and (len(said) > 18 or int(said) > most):
            raise _too_long(most)
        content = bytearray()
        seconds, rate = self._limits.max_body_seconds, self._limits.min_bytes_per_second
        clock = asyncio.get_running_loop().time
        patience = Patience(seconds, rate, clock())
        try:
            async with asyncio.timeout_at(patience.until) as timeout:
                async for chunk in request.stream():
                    content += chunk
                    patience.moved(len(chunk), clock())
                    timeout.reschedule(patience.until)
                    if len(content) > most:
                        raise _too_long(most)
                    if len(content) > SMALL_BODY_BYTES:
                        share.grow(len(content) - share.amount)
        except ClientDisconnect:
            current_record().is_gone = True
            raise RequestError("the connection closed before the whole body had arrived") from None
        except TimeoutError:
            message = f"the body stalled for {seconds:g} seconds, or came with fewer than {rate} bytes a second"
            raise ApiError(408, message, code="body_too_slow") from None
        return bytes(content)


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"the body is longer than {most} bytes", code="body_too_long")


def _decode(content: bytes) -> Any:
    try:
        return pydantic_core.from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def _decode_large(content: bytes, check: Callable[[Any], T], max_values: int) -> T:
    count = num_values(content)
    if count > max_values:
        raise ApiError(
            413, f"the body has {count} values, at most {max_values} are taken: send several requests",
            code="body_too_long",
        )  # fmt: skip
    return check(_decode(content))
