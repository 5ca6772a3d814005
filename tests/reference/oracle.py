"""Slow twin of `benchmarks.replay.oracle`: every earlier place is tried."""

from __future__ import annotations


def slow_steps(requests: list[tuple[list[int], list[int]]], limit: int) -> list[int]:
    """Steps of each request, (prompt, output), where each draft is the best that stands anywhere earlier."""
    text: list[int] = []
    counts = []
    for prompt, output in requests:
        begin, known = len(text) + len(prompt), len(text) + len(prompt) + len(output)
        text += [*prompt, *output, -1]
        steps = 0
        while begin < known:
            drafted = 0
            for place in range(begin - 1):
                if text[place] == text[begin - 1]:
                    size = 0
                    while begin + size < known and text[place + 1 + size] == text[begin + size]:
                        size += 1
                    drafted = max(drafted, size)
            begin += min(drafted, limit, known - 1 - begin) + 1
            steps += 1
        counts.append(steps)
    return counts
