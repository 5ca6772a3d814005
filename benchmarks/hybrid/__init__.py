"""Replays recorded requests for which another drafter's accepted length is known at every position."""
