"""Compile the kernels that a server needs at its start ahead of time: ``python -m server.command.prebuild``.

The machine code is written into the directory of the imported package, so that it can be shipped, see `make wheel` and
deploy/Containerfile. Kernels of the CPU layers are not included, see `ssd.jit.code_cache`.
"""

from __future__ import annotations

from contextlib import ExitStack

from ssd.jit.code_cache import PREBUILT, kernel_counts, prebuild


def main() -> None:
    """Compile all kernels in advance and store their machine code in the package.

    The kernels of the server are compiled by running the bundled model, with and without its draft head. Those of the
    vLLM integration are compiled by running its drafter.
    """
    if not prebuild():
        print("no kernels are prebuilt on this processor: each machine compiles them at its first start")
        return
    from server.command.arguments import parse_arguments  # imports kernels, so after `prebuild`
    from server.command.start import EngineLoader
    from ssd.bundled import HEAD_PATH
    from ssd.drafting.batch_drafter import BatchDrafter

    for arguments in ([], ["--draft-head", str(HEAD_PATH)]):
        with ExitStack() as resources:
            EngineLoader(parse_arguments(arguments, {}))(resources).warm_up()
    BatchDrafter(longest=1, max_length=8, vocab_size=8).warm_up()
    files = list(PREBUILT.glob("*"))
    size = sum(file.stat().st_size for file in files) / 1e6
    print(f"{PREBUILT}: {len(files)} files, {size:.1f} MB, compiled in {kernel_counts().compile_seconds:.0f} s")


if __name__ == "__main__":
    main()
