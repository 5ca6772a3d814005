"""Admission control: shared memory budgets and per-tenant quotas for requests that do not have a slot yet."""

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
"""The names of the HTTP response headers that report a tenant's rate limits, as in OpenAI's API."""

REFUSALS: Final = ("queue", "requests", "tokens")
"""The limits for which a tenant's request can be rejected: requests in flight, requests per minute, tokens per minute.
"""


class Reservation:
    """The units of a `SharedBudget` that one HTTP request has reserved. ``give_back`` may be called more than once."""

    def __init__(self, budget: SharedBudget, tenant: str | None) -> None:
        self._budget, self._tenant = budget, tenant
        self.amount = 0

    def grow(self, amount: int) -> None:
        """Reserve ``amount`` more units. If the tenant's part of the budget is used up, raise QueueFull."""
        self._budget.take(self._tenant, amount, self.amount)
        self.amount += amount

    def give_back(self) -> None:
        self._budget.take(self._tenant, -self.amount, self.amount)
        self.amount = 0


class SharedBudget:
    """A budget of ``limit`` units, e.g. bytes of request bodies, that the requests of all tenants share. Thread-safe.

    A tenant may reserve half of the units that other tenants have not reserved, so that another tenant always finds
    room (Choudhury and Hahne, "Dynamic queue length thresholds", 1998). A single request of a tenant without other
    requests may reserve all of them. ``what`` names the units in error messages.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit, self._what = limit, what
        self._used: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self._used.total()

    def share(self) -> Reservation:
        return Reservation(self, current_record().tenant)

    def take(self, tenant: str | None, amount: int, held: int) -> None:
        """Reserve ``amount`` units of the budget for a tenant; a negative amount releases units. Raises QueueFull.

        ``held`` are the units that the same request has already reserved.
        """
        with self._lock:
            own = self._used[tenant]
            room = self._limit - (self._used.total() - own)
            if tenant is not None and own > held:
                room //= 2
            if amount > 0 and own + amount > room:
                raise QueueFull(f"the server's limit for {self._what} is reached: try again later")
            self._used[tenant] += amount
            assert self._used[tenant] >= 0
            if not self._used[tenant]:
                del self._used[tenant]


class TokenBucket:
    """A token bucket that limits a rate per minute. The bucket starts full, and its content may become negative.

    ``per_minute=None`` means unlimited. The times ``now`` in seconds must not decrease between calls.
    """

    def __init__(self, per_minute: int | None, now: float) -> None:
        self.per_minute = per_minute
        self._left, self._at = float(per_minute or 0), now

    def left(self, now: float) -> float:
        """Return the tokens in the bucket at time ``now``; negative if more tokens were taken than available."""
        if self.per_minute is None:
            return math.inf
        return min(float(self.per_minute), self._left + (now - self._at) * self.per_minute / _MINUTE_S)

    def take(self, amount: float, now: float) -> None:
        """Remove ``amount`` tokens from the bucket, or add them if negative. Its content may become negative."""
        if self.per_minute is not None:
            self._left, self._at = min(float(self.per_minute), self.left(now) - amount), now

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket contains ``amount`` tokens, which may be more than its capacity."""
        if self.per_minute is None:
            return 0.0
        return max(0.0, (min(amount, self.per_minute) - self.left(now)) * _MINUTE_S / self.per_minute)

    def change(self, per_minute: int | None, now: float) -> None:
        """Change the bucket's rate and capacity; the amount that was used in the last minute stays used."""
        used = 0.0 if self.per_minute is None else self.per_minute - self.left(now)
        owed = max(0.0, used - (self.per_minute or 0))
        self._left, self._at, self.per_minute = max((per_minute or 0) - used, -owed), now, per_minute

    def headers(self, name: str, now: float) -> dict[str, str]:
        """Return OpenAI's rate limit headers for the resource ``name``: limit, remaining, and time until full."""
        if self.per_minute is None:
            return {}
        return {
            f"x-ratelimit-limit-{name}": str(self.per_minute),
            f"x-ratelimit-remaining-{name}": str(max(0, math.floor(self.left(now)))),
            f"x-ratelimit-reset-{name}": format_duration(self.wait_s(self.per_minute, now)),
        }


def format_duration(seconds: float) -> str:
    """Format seconds as in OpenAI's rate limit headers, ``12ms``, ``7s``, ``1m30s``, rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


@dataclass(slots=True)
class TenantCounts:
    """Counters of one tenant's requests and tokens since the server's start; ``num_in_flight`` is a current value."""

    num_in_flight: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_refused: Counter[str] = field(default_factory=Counter)


class Account:
    """The quota state and request counters of one tenant; it survives a reload of the tenants file. Thread-safe.

    A server without API keys has one account for all clients.
    """

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
        """The tenant's name, to which reservations in shared budgets are charged; None if the server has no keys."""
        return self.tenant.name or None

    def change(self, tenant: Tenant) -> None:
        with self._lock:
            now = self._clock()
            self.tenant = tenant
            self._requests.change(tenant.quotas.requests_per_minute, now)
            self._tokens.change(tenant.quotas.tokens_per_minute, now)

    def enter(self) -> None:
        """Count a new HTTP request. Raises ApiError if the tenant's requests per minute are used up."""
        with self._lock:
            now = self._clock()
            if (wait_s := self._requests.wait_s(1, now)) > 0:
                message = f"this key may send {self._requests.per_minute} requests per minute: try again later"
                raise self._refused("requests", message, wait_s)
            self._require_tokens(1)
            self._requests.take(1, now)

    def check_quota(self, num_choices: int, num_slots: int) -> None:
        """Raise the error that `admit` would raise for this number of choices, before any prompt is tokenized."""
        quotas = self.tenant.quotas
        if quotas.max_waiting is None:
            return
        most = min(quotas.max_running or num_slots, num_slots) + quotas.max_waiting
        if num_choices > most:
            raise RequestError(
                f"the request has {num_choices} choices, but this key may have {most} at once: lower n or send fewer "
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
        """Admit a request that `enter` has counted. Returns its ticket, whose ``end`` must be called. Raises ApiError.

        ``share`` is the request's reservation in a shared budget, which is released if an exception is raised.
        """
        try:
            with self._lock:
                self.check_quota(num_choices, num_slots)
                most = self._tokens.per_minute
                if most is not None and num_prompt_tokens > most:
                    raise RequestError(
                        f"the prompts have {num_prompt_tokens} tokens, but this key may use {most} per minute: shorten "
                        "the prompts",
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
            message = f"this key may use {self._tokens.per_minute} tokens per minute: try again later"
            raise self._refused("tokens", message, wait_s)

    def _refused(self, kind: str, message: str, wait_s: float) -> ApiError:
        self.use.num_refused[kind] += 1
        headers = {"retry-after": str(max(1, math.ceil(wait_s))), **self.headers()}
        return ApiError(429, message, kind=kind, code="rate_limit_exceeded", headers=headers)


class AdmissionTicket:
    """An admitted request's use of quota and memory budget. ``end`` releases it, and may be called more than once."""

    def __init__(self, account: Account, num_choices: int, num_prompt_tokens: int, share: Reservation | None) -> None:
        self._account: Account | None = account
        self._num_choices, self._num_prompt_tokens, self._share = num_choices, num_prompt_tokens, share
        self._was_begun = False

    def begin(self) -> None:
        """Count the request and its prompt tokens when the engine accepts it; rejected requests are not counted."""
        self._was_begun = True
        if self._account is not None:
            self._account.begin(self._num_prompt_tokens)

    def end(self, num_output_tokens: int) -> None:
        """Release the request's quota and budget when its choices have generated ``num_output_tokens`` in total."""
        if self._share is not None:
            self._share.give_back()
        account, self._account = self._account, None
        if account is not None:
            taken_back = 0 if self._was_begun else self._num_prompt_tokens
            account.end(self._num_choices, num_output_tokens if self._was_begun else 0, taken_back)
