"""Use a model from Python: ``python -m examples.engine``."""

from __future__ import annotations

from ssd import LLM, SamplingParams


def main() -> None:
    """Complete one prompt twice, and print the number of forward passes of each."""
    with LLM() as llm:  # the bundled model; LLM("Qwen/Qwen3-0.6B", cache_dir="learned") keeps what it learns
        for attempt in ("first time", "second time"):
            (answer,) = llm.generate("def read_lines(path):\n", SamplingParams(max_tokens=48, temperature=0))
            print(f"{attempt}: {answer.stats.num_output_tokens} tokens in {answer.stats.num_verify_steps} passes")
        print(answer.text)


if __name__ == "__main__":
    main()
