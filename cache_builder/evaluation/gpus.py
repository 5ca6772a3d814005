"""Cost curves of GPUs that nobody has at hand: rooflines from data sheets. None of it was measured.

A pass reads every weight and all keys and values once, and multiplies every weight with every token: it takes as long
as the slower of the two (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009). Dense models only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cache_builder.replay.cost import CostCurve
from cache_builder.replay.step_costs import StepCosts
from ssd.errors import ConfigError

MEMORY_SHARE = 0.62
"""Of the bandwidth that decoding reaches: vLLM decodes Llama 3.1 8B in bf16 at batch 1 on an H100 at 133 to 141 of the
223 tokens/s that 3.35 TB/s allow."""
COMPUTE_SHARE = 0.6
"""Of the dense arithmetic that wide passes reach: an assumption, what large matrix products commonly come to."""

BYTES_PER_PARAMETER = {"float32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""By what ``--dtype`` names. Weights of int8 and int4 are multiplied in 16 bits."""


@dataclass(frozen=True, slots=True)
class GPU:
    """Figures of one data sheet, all dense: half of those that it gives "with sparsity".

    ``gb_per_s`` : memory bandwidth, 10^9 bytes. ``tflops`` : of bf16 and fp16 tensor cores, float32 accumulation.
    ``fp8_tflops`` : 0 where there are none.
    """

    gb_per_s: float
    tflops: float
    fp8_tflops: float
    source: str


GPUS = {
    "A10": GPU(600, 125, 0, "NVIDIA A10 data sheet"),
    "A100-40GB": GPU(1555, 312, 0, "NVIDIA A100 data sheet, 40 GB"),
    "A100-80GB": GPU(2039, 312, 0, "NVIDIA A100 data sheet, 80 GB SXM"),
    "H100": GPU(3350, 989.5, 1979, "NVIDIA H100 data sheet, SXM"),
    "H100-PCIe": GPU(2000, 756, 1513, "NVIDIA H100 data sheet of 2022, PCIe"),
    "H200": GPU(4800, 989.5, 1979, "NVIDIA H200 data sheet, SXM"),
    "L4": GPU(300, 121, 242.5, "NVIDIA L4 data sheet"),
    "L40S": GPU(864, 362.05, 733, "NVIDIA L40S data sheet"),
    "RTX-3090": GPU(936, 71, 0, "NVIDIA Ampere GA102 whitepaper, GeForce RTX 3090"),
    "RTX-4090": GPU(1008, 165.2, 330.3, "NVIDIA Ada whitepaper, GeForce RTX 4090"),
    "MI300X": GPU(5300, 1307.4, 2614.9, "AMD Instinct MI300X data sheet"),
}


def gpu_named(name: str) -> tuple[str, GPU]:
    """A preset and how it is spelled here, whatever the case. Raises ConfigError with those that there are."""
    wanted = name.casefold().replace(" ", "-").replace("_", "-")
    for spelled, gpu in GPUS.items():
        if spelled.casefold() == wanted or spelled.casefold().removeprefix("rtx-") == wanted:
            return spelled, gpu
    raise ConfigError(f"--gpu {name} is not known: use one of {', '.join(GPUS)}, or --measure MODEL where it runs")


def roofline(
    name: str,
    *,
    num_params: float,
    dtype: str = "bf16",
    batch: int = 1,
    context: int = 1024,
    kv_bytes_per_token: float = 0.0,
) -> StepCosts:
    """Costs on a preset GPU.

    ``num_params`` : of a dense model. ``batch`` : rows of a pass, each of which verifies as many tokens. ``context`` :
    tokens of a row, each of which has ``kv_bytes_per_token`` of keys and values to be read. Raises ConfigError.
    """
    spelled, gpu = gpu_named(name)
    if not 1e5 <= num_params <= 1e14:
        raise ConfigError(f"--model-params must be within 1e5..1e14, got {num_params:g}: 8e9 is 8 billion")
    if dtype not in BYTES_PER_PARAMETER:
        raise ConfigError(f"--model-dtype {dtype} is not known: use one of {', '.join(BYTES_PER_PARAMETER)}")
    if batch < 1 or context < 0 or not 0 <= kv_bytes_per_token <= 1e9:
        raise ConfigError("--batch must be at least 1, --context at least 0, --kv-bytes within 0..1e9")
    tflops = gpu.fp8_tflops if dtype == "fp8" and gpu.fp8_tflops else gpu.tflops
    read_bytes = num_params * BYTES_PER_PARAMETER[dtype] + kv_bytes_per_token * context * batch
    read_s = read_bytes / (gpu.gb_per_s * 1e9 * MEMORY_SHARE)
    token_s = 2.0 * num_params * batch / (tflops * 1e12 * COMPUTE_SHARE)
    step_s = max(read_s, token_s)
    knee = step_s / token_s  # tokens of a row from which on a pass computes longer than it reads
    widths, costs = ([1.0, knee, 2 * knee], [1.0, 1.0, 2.0]) if knee > 1.0 else ([1.0, 2.0], [1.0, 2.0])
    source = (
        f"a roofline, not a measurement: {gpu.source}, {gpu.gb_per_s:g} GB/s of which {MEMORY_SHARE:.0%} and "
        f"{tflops:g} dense TFLOPS of which {COMPUTE_SHARE:.0%}; "
        f"{num_params / 1e9:.3g} billion parameters in {dtype}, batch {batch}, "
        + (f"{context} tokens of context" if kv_bytes_per_token else "keys and values left out")
    )
    return StepCosts(CostCurve(spelled, np.array(widths), np.array(costs)), source, step_ms=step_s * 1e3)
