"""Admission control: shared budgets and per-tenant quotas for requests that do not have a slot yet."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from server.admission.tenant_config import Tenant
from server.base.errors import ApiError
from server.base.request_record import current_record
from ssd.errors import QueueFull, RequestError

_QUEUE_RETRY_S: Final = 1
_MINUTE_S: Final = 60.0

RATE_HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{name}" for what in ("limit", "remaining", "reset") for name in ("requests", "tokens")
)
"""The response headers with an account's rate limits."""

REFUSALS: Final = ("queue", "requests", "tokens")
"""The reasons for which a tenant's request is rejected: too many in flight, too many requests or tokens per minute."""


class Reservation:
    """The part of a budget that one request has reserved. ``give_back`` may be called more than once."""

    def __init__(self, budget: SharedBudget, tenant: str | None) -> None:
        self._budget, self._tenant = budget, tenant
        self.amount = 0

    def grow(self, amount: int) -> None:
        """Reserve more. Raises QueueFull, without a change, if the tenant may not have it now."""
        self._budget.take(self._tenant, amount, self.amount)
        self.amount += amount

    def give_back(self) -> None:
        self._budget.take(self._tenant, -self.amount, self.amount)
        self.amount = 0


class SharedBudget:
    """A shared budget of ``limit`` units, with ``what`` as its name in messages. Thread-safe.

    A tenant may reserve half of what others leave, so that there is always room for another tenant (Choudhury and
    Hahne, "Dynamic queue length thresholds", 1998). A single request of a tenant without other requests may reserve all
    of it.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit, self._what = limit, what
        self._used: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self._used.total()

    def share(self) -> Reservation:
        """Return an empty share for the current request."""
        return Reservation(self, current_record().tenant)

    def take(self, tenant: str | None, amount: int, held: int) -> None:
        """Reserve ``amount``, or release it if negative. Raises QueueFull.

        Args:
            tenant: The tenant. None: there are no tenants.
            amount: The amount.
            held: The amount that the share has reserved already.
        """
        with self._lock:
            own = self._used[tenant]
            room = self._limit - (self._used.total() - own)
            if tenant is not None and own > held:
                room //= 2
            if amount > 0 and own + amount > room:
                raise QueueFull(f"the server has all the {self._what} it takes at once: try again later")
            self._used[tenant] += amount
            assert self._used[tenant] >= 0
            if not self._used[tenant]:
                del self._used[tenant]


class TokenBucket:
    """A token bucket that starts full; None is unlimited. It may go into debt. ``now`` must never decrease."""

    def __init__(self, per_minute: int | None, now: float) -> None:
        self.per_minute = per_minute
        self._left, self._at = float(per_minute or 0), now

    def left(self, now: float) -> float:
        """Return the amount that may be taken; negative if there is a debt."""
        if self.per_minute is None:
            return math.inf
        return min(float(self.per_minute), self._left + (now - self._at) * self.per_minute / _MINUTE_S)

    def take(self, amount: float, now: float) -> None:
        """Take ``amount`` even if it is not available; return it if negative."""
        if self.per_minute is not None:
            self._left, self._at = min(float(self.per_minute), self.left(now) - amount), now

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until ``amount``, at most a minute's allowance, is available."""
        if self.per_minute is None:
            return 0.0
        return max(0.0, (min(amount, self.per_minute) - self.left(now)) * _MINUTE_S / self.per_minute)

    def change(self, per_minute: int | None, now: float) -> None:
        """Change the allowance and keep the amount used, at most a minute's worth unless there was a larger debt."""
        used = 0.0 if self.per_minute is None else self.per_minute - self.left(now)
        owed = max(0.0, used - (self.per_minute or 0))
        self._left, self._at, self.per_minute = max((per_minute or 0) - used, -owed), now, per_minute

    def headers(self, name: str, now: float) -> dict[str, str]:
        """Return OpenAI's headers for ``name``: limit, remaining amount, and the time until it is full again."""
        if self.per_minute is None:
            return {}
        return {
            f"x-ratelimit-limit-{name}": str(self.per_minute),
            f"x-ratelimit-remaining-{name}": str(max(0, math.floor(self.left(now)))),
            f"x-ratelimit-reset-{name}": format_duration(self.wait_s(self.per_minute, now)),
        }


def format_duration(seconds: float) -> str:
    """Format a time like OpenAI, ``12ms``, ``7s``, ``1m30s``, rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


@dataclass(slots=True)
class TenantCounts:
    """The counts of one tenant since the start. ``num_in_flight`` is current: choices that wait or run."""

    num_in_flight: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_refused: Counter[str] = field(default_factory=Counter)


class Account:
    """The use of one tenant, which outlives changes of its rules, or of all clients without keys. Thread-safe."""

    def __init__(self, tenant: Tenant, clock: Callable[[], float] = time.monotonic) -> None:
        self.tenant = tenant
        self.use = TenantCounts()
        self._clock = clock
        self._lock = threading.RLock()
        now = clock()
        self._requests = TokenBucket(tenant.quotas.requests_per_minute, now)
        self._tokens = TokenBucket(tenant.quotas.tokens_per_minute, now)

    @property
    def name(self) -> str:
        return self.tenant.name

    @property
    def payer(self) -> str | None:
        """The name under which shared budgets are divided. None: there are no keys."""
        return self.tenant.name or None

    def change(self, tenant: Tenant) -> None:
        """Apply new rules. Requests in flight continue."""
        with self._lock:
            now = self._clock()
            self.tenant = tenant
            self._requests.change(tenant.quotas.requests_per_minute, now)
            self._tokens.change(tenant.quotas.tokens_per_minute, now)

    def enter(self) -> None:
        """Count a request before any work is done for it. Raises ApiError, without counting, if no request is left."""
        with self._lock:
            now = self._clock()
            if (wait_s := self._requests.wait_s(1, now)) > 0:
                message = f"this key may send {self._requests.per_minute} requests a minute: try again later"
                raise self._refused("requests", message, wait_s)
            self._require_tokens(1)
            self._requests.take(1, now)

    def check_quota(self, num_choices: int, num_slots: int) -> None:
        """Raise the error that `admit` would raise for this number of choices, before prompts are tokenized."""
        quotas = self.tenant.quotas
        if quotas.max_waiting is None:
            return
        most = min(quotas.max_running or num_slots, num_slots) + quotas.max_waiting
        if num_choices > most:
            raise RequestError(
                f"the request has {num_choices} choices, and this key may have {most} at once: lower n or send fewer "
                "prompts",
                param="n",
            )
        with self._lock:
            if self.use.num_in_flight + num_choices > most:
                message = f"this key has {self.use.num_in_flight} of its {most} requests in flight: try again later"
                raise self._refused("queue", message, _QUEUE_RETRY_S)

    def admit(
        self, *, num_choices: int, num_prompt_tokens: int, num_slots: int, share: Reservation | None = None
    ) -> AdmissionTicket:
        """Admit a request that has entered, and return its ticket, which must be ended.

        Args:
            num_choices: The number of choices.
            num_prompt_tokens: The number of prompt tokens over all choices.
            num_slots: The number of slots of the engine.
            share: The request's share of a budget. It is released if an exception is raised.

        Raises:
            ApiError: A quota is exhausted.
        """
        try:
            with self._lock:
                self.check_quota(num_choices, num_slots)
                most = self._tokens.per_minute
                if most is not None and num_prompt_tokens > most:
                    raise RequestError(
                        f"the prompts have {num_prompt_tokens} tokens, and this key may use {most} a minute: shorten "
                        "them",
                        param="prompt",
                    )
                self._require_tokens(num_prompt_tokens)
                self._tokens.take(num_prompt_tokens, self._clock())
                self.use.num_in_flight += num_choices
        except BaseException:
            if share is not None:
                share.give_back()
            raise
        return AdmissionTicket(self, num_choices, num_prompt_tokens, share)

    def headers(self) -> dict[str, str]:
        """Return the rate limit headers for an answer; empty without limits."""
        with self._lock:
            now = self._clock()
            return self._requests.headers("requests", now) | self._tokens.headers("tokens", now)

    def begin(self, num_prompt_tokens: int) -> None:
        with self._lock:
            self.use.num_requests += 1
            self.use.num_prompt_tokens += num_prompt_tokens

    def end(self, num_choices: int, num_output_tokens: int, taken_back: int) -> None:
        with self._lock:
            self.use.num_in_flight -= num_choices
            assert self.use.num_in_flight >= 0
            self.use.num_output_tokens += num_output_tokens
            self._tokens.take(num_output_tokens - taken_back, self._clock())

    def _require_tokens(self, num_tokens: int) -> None:
        if (wait_s := self._tokens.wait_s(max(1, num_tokens), self._clock())) > 0:
            message = f"this key may use {self._tokens.per_minute} tokens a minute: try again later"
            raise self._refused("tokens", message, wait_s)

    def _refused(self, kind: str, message: str, wait_s: float) -> ApiError:
        self.use.num_refused[kind] += 1
        headers = {"retry-after": str(max(1, math.ceil(wait_s))), **self.headers()}
        return ApiError(429, message, kind=kind, code="rate_limit_exceeded", headers=headers)


class AdmissionTicket:
    """The resources that a request holds until ``end``, which may be called more than once."""

    def __init__(self, account: Account, num_choices: int, num_prompt_tokens: int, share: Reservation | None) -> None:
        self._account: Account | None = account
        self._num_choices, self._num_prompt_tokens, self._share = num_choices, num_prompt_tokens, share
        self._was_begun = False

    def begin(self) -> None:
        """Count the request when the engine accepts it. Requests that were rejected before count for nobody."""
        self._was_begun = True
        if self._account is not None:
            self._account.begin(self._num_prompt_tokens)

    def end(self, num_output_tokens: int) -> None:
        """Release everything when the choices have ended with this number of tokens in total."""
        if self._share is not None:
            self._share.give_back()
        account, self._account = self._account, None
        if account is not None:
            taken_back = 0 if self._was_begun else self._num_prompt_tokens
            account.end(self._num_choices, num_output_tokens if self._was_begun else 0, taken_back)
