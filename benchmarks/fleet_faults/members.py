"""Faults of the servers."""

from __future__ import annotations

import shutil

from benchmarks.fleet_faults.fleet import Fleet
from benchmarks.fleet_faults.proxy import CLEAR, Weather


def kill(fleet: Fleet) -> None:
    """kill -9 of one server, which comes back with its directory."""
    member = fleet.chance.choice(fleet.members)
    fleet.kill_server(member)


def restart(fleet: Fleet) -> None:
    """One server is closed in order and comes back with its directory."""
    member = fleet.chance.choice(fleet.members)
    with member.outage():
        member.history.end_life(in_order=member.server.terminate())
        member.server.start()


def anew(fleet: Fleet) -> None:
    """One server is closed and comes back with nothing, while what it asks Redis for is late and cut off."""
    member = fleet.chance.choice(fleet.members)
    with member.outage():
        member.server.terminate()
        member.history.end_life(in_order=False)
        member.history.lose_all()
        shutil.rmtree(member.directory)
        member.proxy.weather = Weather(jitter_s=0.3)
        member.server.start()
    for _ in range(5):
        fleet.hold(0.3)
        member.proxy.cut()
    member.proxy.weather = CLEAR


def kill_unheard(fleet: Fleet) -> None:
    """kill -9 of a server that Redis answers nothing, which comes back while it still does not."""
    member = fleet.chance.choice(fleet.members)
    member.proxy.weather = Weather(is_silent=True)
    fleet.hold(2.0)
    fleet.kill_server(member)
    member.proxy.weather = CLEAR
