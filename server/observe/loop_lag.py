"""How late the event loop is: what every connection waits for, whatever it asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.25


async def watch_loop(observe: Callable[[float], None]) -> None:
    """Give ``observe`` the seconds by which the loop was late, four times a second, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        observe(max(0.0, loop.time() - due))
