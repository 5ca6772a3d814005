"""Admission control: shared memory budgets and per-tenant quotas for requests that do not have a slot yet."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
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


class SharedBudget:
    """A budget of ``limit`` units, e.g. bytes of request bodies, that the requests of all tenants share. Thread-safe.

    The requests of one tenant together may hold at most half of the units that other tenants do not hold. So another
    tenant always finds room (Choudhury and Hahne, "Dynamic queue length thresholds", 1998). A tenant with a single
    request may hold all of the units that other tenants do not hold. Without tenants, any request may hold all units
    that are left. ``what`` names the units in error messages.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit, self._what = limit, what
        self._used: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self._used.total()

    def reserve(self, amount: int = 0) -> Reservation:
        """Reserve ``amount`` units for the current HTTP request.

        Raises QueueFull if the tenant may not hold so many units.
        """
        reservation = Reservation(self, current_record().tenant)
        reservation.grow(amount)
        return reservation

    def acquire(self, tenant: str | None, amount: int, held: int) -> None:
        """Take ``amount`` more units for a request that already has ``held`` units.

        Raises QueueFull if the request's tenant would then hold more units than `SharedBudget` allows.
        """
        with self._lock:
            own = self._used[tenant]
            room = self._limit - (self._used.total() - own)
            if tenant is not None and own > held:
                room //= 2
            if amount > 0 and own + amount > room:
                raise QueueFull(f"the server's limit for {self._what} is reached: try again later")
            self._add(tenant, amount)

    def release(self, tenant: str | None, amount: int) -> None:
        with self._lock:
            self._add(tenant, -amount)

    def _add(self, tenant: str | None, amount: int) -> None:
        self._used[tenant] += amount
        assert self._used[tenant] >= 0
        if not self._used[tenant]:
            del self._used[tenant]


class Reservation(AbstractContextManager["Reservation"]):
    """The units of a `SharedBudget` and the part of a tenant's quotas that one HTTP request holds until it ends.

    ``release`` returns both. It must be called, and further calls have no effect. A ``with`` block calls it at its end.

    Attributes:
        amount: The reserved units of the budget.
    """

    def __init__(self, budget: SharedBudget, tenant: str | None) -> None:
        self._budget, self._tenant = budget, tenant
        self.amount = 0
        self._account: Account | None = None
        self._num_choices = self._num_prompt_tokens = 0
        self._is_accepted = False

    def grow(self, amount: int) -> None:
        """Reserve ``amount`` more units. Raises QueueFull if the tenant may not hold that many, see `SharedBudget`."""
        self._budget.acquire(self._tenant, amount, self.amount)
        self.amount += amount

    def charge(self, account: Account, num_choices: int, num_prompt_tokens: int, num_slots: int) -> None:
        """Acquire quota for the choices and prompt tokens of the request. Raises the errors of `Account.acquire`."""
        account.acquire(num_choices, num_prompt_tokens, num_slots)
        self._account, self._num_choices, self._num_prompt_tokens = account, num_choices, num_prompt_tokens

    def mark_accepted(self) -> None:
        """Add the request and its prompt tokens to the tenant's counters, because the engine has accepted the request.

        Without this call, ``release`` refunds the prompt tokens to the tenant's quota.
        """
        self._is_accepted = True
        if self._account is not None:
            self._account.count(self._num_prompt_tokens)

    def release(self, num_output_tokens: int = 0) -> None:
        """Release all units and quotas. ``num_output_tokens`` is the number of tokens generated for all choices."""
        self._budget.release(self._tenant, self.amount)
        self.amount = 0
        account, self._account = self._account, None
        if account is not None and self._is_accepted:
            account.release(self._num_choices, num_output_tokens, num_unused_tokens=0)
        elif account is not None:
            account.release(self._num_choices, 0, num_unused_tokens=self._num_prompt_tokens)

    def __exit__(self, *_error: object) -> None:
        self.release()


class TokenBucket:
    """A token bucket that limits a rate per minute. The bucket starts full, and its content may become negative.

    ``per_minute=None`` means unlimited. ``now`` is the current time in seconds, which must not decrease between calls.
    """

    def __init__(self, per_minute: int | None, now: float) -> None:
        self.per_minute = per_minute
        self._available, self._at = float(per_minute or 0), now

    def available(self, now: float) -> float:
        """Return the tokens in the bucket at time ``now``; negative if more tokens were taken than available."""
        if self.per_minute is None:
            return math.inf
        return min(float(self.per_minute), self._available + (now - self._at) * self.per_minute / _MINUTE_S)

    def consume(self, amount: float, now: float) -> None:
        """Remove ``amount`` tokens from the bucket, or add tokens if ``amount`` is negative."""
        if self.per_minute is not None:
            self._available, self._at = min(float(self.per_minute), self.available(now) - amount), now

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket contains ``amount`` tokens, or is full if its capacity is smaller."""
        if self.per_minute is None:
            return 0.0
        return max(0.0, (min(amount, self.per_minute) - self.available(now)) * _MINUTE_S / self.per_minute)

    def change(self, per_minute: int | None, now: float) -> None:
        """Change the bucket's rate and capacity to ``per_minute``.

        Tokens that were taken in the last minute stay taken. So the change does not refill the bucket, and it does not
        make a negative content more negative.
        """
        used = 0.0 if self.per_minute is None else self.per_minute - self.available(now)
        owed = max(0.0, used - (self.per_minute or 0))
        self._available, self._at, self.per_minute = max((per_minute or 0) - used, -owed), now, per_minute

    def headers(self, name: str, now: float) -> dict[str, str]:
        """Return OpenAI's rate limit headers for the resource ``name``: limit, remaining, and time until full."""
        if self.per_minute is None:
            return {}
        return {
            f"x-ratelimit-limit-{name}": str(self.per_minute),
            f"x-ratelimit-remaining-{name}": str(max(0, math.floor(self.available(now)))),
            f"x-ratelimit-reset-{name}": format_duration(self.wait_s(self.per_minute, now)),
        }


def format_duration(seconds: float) -> str:
    """Format seconds as in OpenAI's rate limit headers, ``12ms``, ``7s``, ``1m30s``, rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


class Account:
    """The quota state and request counters of one tenant; it survives a reload of the tenants file. Thread-safe.

    A server without API keys has one account for all clients.

    Attributes:
        num_in_flight: The number of choices that wait or run now. All other counts are since the server's start.
        num_refused: The number of rejected requests for each limit in ``REFUSALS``.
    """

    def __init__(self, tenant: Tenant, clock: Callable[[], float] = time.monotonic) -> None:
        self.tenant = tenant
        self.num_in_flight = self.num_requests = self.num_prompt_tokens = self.num_output_tokens = 0
        self.num_refused: Counter[str] = Counter()
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
                raise self._make_rejection("requests", message, wait_s)
            self._require_tokens(1)
            self._requests.consume(1, now)

    def check_quota(self, num_choices: int, num_slots: int) -> None:
        """Raise the error that `acquire` would raise for this number of choices.

        The check needs no token count, so it comes before the prompts are tokenized.
        """
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
            if self.num_in_flight + num_choices > most:
                message = f"this key has {self.num_in_flight} of at most {most} requests in progress: try again later"
                raise self._make_rejection("queue", message, _QUEUE_RETRY_S)

    def acquire(self, num_choices: int, num_prompt_tokens: int, num_slots: int) -> None:
        """Take quota for the choices and prompt tokens of a request.

        Raises:
            RequestError: If the request alone exceeds a quota, so that it can never be accepted.
            ApiError: With status 429, if the quota is used up now, so that the client should retry later.
        """
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
            self._tokens.consume(num_prompt_tokens, self._clock())
            self.num_in_flight += num_choices

    def release(self, num_choices: int, num_output_tokens: int, num_unused_tokens: int) -> None:
        """Release the quota of ended choices: charge output tokens, and refund prompt tokens that were not computed."""
        with self._lock:
            self.num_in_flight -= num_choices
            assert self.num_in_flight >= 0
            self.num_output_tokens += num_output_tokens
            self._tokens.consume(num_output_tokens - num_unused_tokens, self._clock())

    def headers(self) -> dict[str, str]:
        with self._lock:
            now = self._clock()
            return self._requests.headers("requests", now) | self._tokens.headers("tokens", now)

    def count(self, num_prompt_tokens: int) -> None:
        with self._lock:
            self.num_requests += 1
            self.num_prompt_tokens += num_prompt_tokens

    def _require_tokens(self, num_tokens: int) -> None:
        if (wait_s := self._tokens.wait_s(max(1, num_tokens), self._clock())) > 0:
            message = f"this key may use {self._tokens.per_minute} tokens per minute: try again later"
            raise self._make_rejection("tokens", message, wait_s)

    def _make_rejection(self, kind: str, message: str, wait_s: float) -> ApiError:
        self.num_refused[kind] += 1
        headers = {"retry-after": str(max(1, math.ceil(wait_s))), **self.headers()}
        return ApiError(429, message, kind=kind, code="rate_limit_exceeded", headers=headers)
