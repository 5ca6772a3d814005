"""The faults, and which of them make a round."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, NamedTuple

from benchmarks.fleet_faults import members, network, store
from benchmarks.fleet_faults.fleet import Fleet


class Fault(NamedTuple):
    """``inject`` returns when the fault is over; the load runs meanwhile."""

    name: str
    inject: Callable[[Fleet], None]


NETWORK: Final = (
    Fault("delay", network.delay),
    Fault("jitter", network.jitter),
    Fault("resets", network.resets),
    Fault("ends", network.ends),
    Fault("half-open", network.half_open),
    Fault("broken-off", network.broken_off),
    Fault("flipped-bits", network.flipped_bits),
    Fault("random-bytes", network.random_bytes),
    Fault("wrong-answers", network.wrong_answers),
    Fault("oversized-answers", network.oversized_answers),
    Fault("shifted-answers", network.shifted_answers),
    Fault("trickle", network.trickle),
    Fault("sip", network.sip),
)
STORE: Final = (
    Fault("pause", store.pause),
    Fault("stop", store.stop),
    Fault("flushall", store.flushall),
    Fault("redis-kill", store.kill),
    Fault("redis-kill-and-lose", store.kill_and_lose),
    Fault("failover", store.failover),
    Fault("failover-after-kill", store.failover_after_kill),
    Fault("failover-to-the-past", store.failover_to_the_past),
    Fault("full", store.full),
    Fault("evicting", store.evicting),
    Fault("password", store.password),
    Fault("rights", store.rights),
    Fault("clock-ahead", store.clock_ahead),
    Fault("clock-back", store.clock_back),
    Fault("keys-of-another-kind", store.keys_of_another_kind),
    Fault("logs-mixed-up", store.logs_mixed_up),
    Fault("published-garbled", store.published_garbled),
)
MEMBERS: Final = (
    Fault("server-kill", members.kill),
    Fault("server-restart", members.restart),
    Fault("server-anew", members.anew),
    Fault("server-kill-unheard", members.kill_unheard),
)
NAMES: Final = tuple(fault.name for fault in (*NETWORK, *STORE, *MEMBERS))


def drawn(num_rounds: int, seed: int, only: list[str] | None = None) -> list[tuple[Fault, ...]]:
    """What happens in each round: mostly one fault, in every fourth one of each kind at once.

    All are drawn before any comes again, in an order that the seed says. ``only`` : of these names, one a round.
    """
    chance = random.Random(seed)
    everything = [fault for fault in (*NETWORK, *STORE, *MEMBERS) if only is None or fault.name in only]
    rounds: list[tuple[Fault, ...]] = []
    waiting: list[Fault] = []
    for number in range(num_rounds):
        if only is None and number % 4 == 3:
            rounds.append(tuple(chance.choice(kind) for kind in (NETWORK, STORE, MEMBERS)))
            continue
        waiting = waiting or chance.sample(everything, len(everything))
        rounds.append((waiting.pop(),))
    return rounds
