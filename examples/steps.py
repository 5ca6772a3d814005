"""Show each forward pass of a request: ``python -m examples.steps``."""

from __future__ import annotations

from ssd import LLM, SamplingParams

_PROMPT = "for name in sorted(os.listdir(path)):\n"


def main() -> None:
    """Complete one prompt twice, and print the draft and the output of each forward pass."""
    with LLM() as llm:  # the bundled model
        for attempt in ("first", "second"):
            print(f"{attempt} run\npass  source     drafted  accepted  accepted tokens + token sampled by the model")
            num_passes = num_tokens = 0
            for output in llm.stream(_PROMPT, SamplingParams(max_tokens=40, temperature=0)):
                draft, ids = output.draft, output.token_ids
                if draft is None:
                    continue
                accepted, sampled = (
                    llm.codec.decode(part) for part in (ids[: draft.num_accepted], ids[draft.num_accepted :])
                )
                counts = f"{draft.number:>4}  {draft.source:<9}  {draft.num_drafted:>7}  {draft.num_accepted:>8}"
                print(f"{counts}  {f'{accepted!r} + ' if accepted else ''}{sampled!r}")
                num_passes, num_tokens = draft.number, num_tokens + len(ids)
            print(f"{num_passes} passes for {num_tokens} tokens\n")


if __name__ == "__main__":
    main()
