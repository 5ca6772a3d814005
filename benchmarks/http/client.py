"""A client of one keep-alive connection that costs little beside the server it measures."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self

_HEAD = "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"


class Connection:
    """To be used by one task at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Self:
        """Connect to a port of this machine. Raises OSError."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))

    async def post(self, path: str, body: bytes) -> list[Any]:
        """The JSON of an answer, or of each event of a stream. Raises ValueError for what is no success."""
        self._writer.write(_HEAD.format(path=path, length=len(body)).encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        if "transfer-encoding: chunked" in head:
            events = (await self._chunks()).decode().split("\n\n")
            found = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
            content = [json.loads(event) for event in found if event != "[DONE]"]
        else:
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            content = [json.loads(await self._reader.readexactly(length))]
        if " 200 " not in head.partition("\r\n")[0]:
            raise ValueError(f"{head.partition(chr(13))[0]}: {content}")
        return content

    async def _chunks(self) -> bytes:
        """All chunks, taken apart once the last is here: no event ends as the mark of the end does."""
        whole = bytearray()
        while not whole.endswith(b"\r\n0\r\n\r\n"):
            piece = await self._reader.read(1 << 16)
            if not piece:
                raise ValueError("the connection was closed in the middle of an answer")
            whole += piece
        content, at = bytearray(), 0
        while length := int(whole[at : (start := whole.index(b"\r\n", at) + 2) - 2], 16):
            content += whole[start : start + length]
            at = start + length + 2
        return bytes(content)

    def close(self) -> None:
        """Close it."""
        self._writer.close()
