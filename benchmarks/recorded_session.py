"""Record the session that the web UI replays: ``python -m benchmarks.recorded_session --out session.json``.

The bundled model writes no useful text, so the web UI also shows a short session of an SQL agent, which was written for
this project. The drafter of this checkout replays its requests in order: it drafts each request from its own context
and from earlier requests. The result lists the accepted and rejected draft tokens of every pass.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cache_builder.evaluation.costs import flat_curve
from cache_builder.evaluation.decoding import OutputDecoder, warm_up
from cache_builder.evaluation.log import RecordedOutput
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig
from ssd.drafting.draft_records import SOURCES
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec

_SCHEMA = """Tables:
orders(id, customer_id, placed_at, region, amount)
returns(id, order_id, returned_at, reason, amount)
customers(id, name, region, since)
Call run_sql with one query, then answer in one sentence.
"""


def _query(name: str, table: str, day: str, year: int) -> str:
    return (
        '{"name": "run_sql", "arguments": {"query": "SELECT region, SUM(amount) AS ' + name + f" FROM {table} "
        f"WHERE {day} >= '{year}-01-01' AND {day} < '{year + 1}-01-01' GROUP BY region ORDER BY {name} DESC\"}}}}\n"
    )


_REQUESTS = (
    (
        "Which region sold most in 2025?",
        _query("revenue", "orders", "placed_at", 2025)
        + "In 2025 the region with the highest revenue was North, with 1,204,310 EUR.\n",
    ),
    (
        "And in 2024?",
        _query("revenue", "orders", "placed_at", 2024)
        + "In 2024 the region with the highest revenue was South, with 1,187,952 EUR.\n",
    ),
    (
        "Which region had the most returns in 2025?",
        _query("returned", "returns", "returned_at", 2025)
        + "In 2025 the region with the highest value of returns was East, with 83,420 EUR.\n",
    ),
    (
        "Compare the revenue of 2023.",
        _query("revenue", "orders", "placed_at", 2023)
        + "In 2023 the region with the highest revenue was North, with 1,044,118 EUR.\n",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args(argv).out
    session = record()
    out.write_text(json.dumps({"requests": session}, separators=(",", ":")) + "\n")
    print(
        json.dumps({"passes": [len(each["passes"]) for each in session], "tokens": [_size(each) for each in session]})
    )
    return 0


def record() -> list[dict[str, Any]]:
    """Replay the requests and return the passes of each in the format of the API's field ``draft``."""
    codec = TextCodec.load(str(MODEL_PATH))
    decoder, found = OutputDecoder(flat_curve(32), draft=DraftConfig(), sure=0.0), []
    warm_up()
    with CacheManager(CacheConfig(), codec.fingerprint, inline=True) as caches:
        cache = caches.get()
        for question, answer in _REQUESTS:
            context = np.array(codec.encode_prompt(f"{_SCHEMA}{question}\n"), np.int32)
            output = np.array(codec.encode_completion(answer), np.int32)
            row = RecordedOutput(context, output)
            steps = decoder.decode(row, cache.snapshot())
            texts = _texts(codec, output.tolist())
            assert "".join(texts) == answer
            passes, start = list[dict[str, Any]](), 0
            for drafted, accepted, source in zip(steps.drafted, steps.accepted, steps.sources, strict=True):
                stop = start + int(accepted) + 1
                passes.append(
                    {
                        "pass": len(passes) + 1,
                        "source": SOURCES[source] if drafted else None,
                        "num_drafted": int(drafted),
                        "num_accepted": int(accepted),
                        "texts": texts[start:stop],
                    }
                )
                start = stop
            found.append({"prompt": question, "passes": passes})
            cache.append(row.text(), prompt_length=len(context))
            cache.maintain()
    return found


def _texts(codec: TextCodec, token_ids: list[int]) -> list[str]:
    ends = [codec.decode(token_ids[:stop], skip_special_tokens=True) for stop in range(len(token_ids) + 1)]
    return [after[len(before) :] for before, after in pairwise(ends)]


def _size(request: dict[str, Any]) -> int:
    return sum(len(each["texts"]) for each in request["passes"])


if __name__ == "__main__":
    sys.exit(main())
