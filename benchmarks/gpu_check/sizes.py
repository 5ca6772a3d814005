"""How large every part is: on a GPU, and on a CPU, where a run is a look at the script itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Each is an option of the command line; tuples take several numbers. The defaults are a GPU's."""

    prompts: int = 32
    """Of the comparison of outputs, in each type of numbers."""
    max_tokens: int = 48
    """Of its outputs."""
    requests: int = 80
    """Of the stream of growth."""
    repeated: int = 24
    """Requests that are asked again."""
    rounds: int = 16
    """Timed passes or steps of each shape."""
    batch: tuple[int, ...] = (1, 4, 16)
    """Rows of the small model's timed passes."""
    width: tuple[int, ...] = (1, 2, 5, 9, 17, 65)
    """Positions of a row of these."""
    large: str = "8b"
    """Shape of the large model, see `benchmarks.decode.shapes`."""
    small: str = "1b"
    """Shape of the small one."""
    context: int = 1024
    """Tokens that a row of the two holds."""
    step_widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Positions of timed steps at batch 1."""
    step_batches: tuple[int, ...] = (8, 32, 64)
    """Larger batches of timed steps."""
    attention_contexts: tuple[int, ...] = (1024, 8192)
    """Of the race of attentions."""
    attention_batches: tuple[int, ...] = (1, 32)
    """Rows of these."""
    attention_widths: tuple[int, ...] = (1, 16, 64)
    """Positions of these."""
    longest: int = 8192
    """Longest text of the comparison of attentions with float32."""
    copy_mb: int = 2048
    """Size of the copy that tells what the memory can do."""
    index_tokens: int = 1_000_000
    """Tokens that the index holds while drafting is timed."""
    propose_rows: int = 64
    """Rows that are drafted for in one step."""
    overhead_batch: tuple[int, ...] = (1, 4, 16, 64)
    """Of speculation that gains nothing."""
    pairs: int = 8
    """Of the same requests with and without speculation."""
    profile_batch: tuple[int, ...] = (1, 32)
    """Of the profiled steps."""
    soak_requests: int = 2000
    """Of the soak; every seventh is cancelled."""
    reopened: int = 4
    """Times that the engine is opened and closed again."""


ON_CPU = Sizes(
    prompts=2,
    max_tokens=8,
    requests=3,
    repeated=2,
    rounds=2,
    batch=(1, 3),
    width=(1, 4),
    large="tiny",
    small="tiny",
    context=64,
    step_widths=(1, 4),
    step_batches=(2,),
    attention_contexts=(64,),
    attention_batches=(1,),
    attention_widths=(1, 4),
    longest=96,
    copy_mb=16,
    index_tokens=4000,
    propose_rows=4,
    overhead_batch=(1,),
    pairs=1,
    profile_batch=(1, 2),
    soak_requests=24,
    reopened=2,
)
