"""The command ``ssd-cache build``, which builds a cache directory from logs and documents."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cache_builder.building.build import BuildOptions, build
from cache_builder.building.resumable import find_resumable
from cache_builder.commands.options import add_log_arguments, chat_template_from_options, progress_bar
from cache_builder.inputs.record import STANDARD_INPUT, FieldNames
from ssd.errors import ConfigError
from ssd.retrieval.cache_manager import DEFAULT_NAMESPACE
from ssd.retrieval.files import check_namespace

_DESCRIPTION = """\
Build a cache directory from logs and documents. `ssd-serve --warm DIR` drafts from it, already in the first request.

An INPUT is a file, a quoted pattern ('logs/**/*.jsonl.zst'), a directory (its files of known formats, sorted), the URL
of any of these (s3://bucket/logs, gs://, https://; fsspec finds the credentials), or - for standard input.
Formats are detected from a file's first bytes, unless its name (.jsonl, .json, .csv, .parquet) or --format decides:
  JSON                   one object per line, an array of objects, or objects over several lines
  CSV, Parquet, Arrow    the same objects as rows
  text                   one document
.gz, .zst, .xz, .bz2 and .lz4 files are decompressed; archives (zip, tar) are rejected.

Supported objects:
  {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
  {"prompt": "...", "completion": "..."}    also "messages" or "input" with "response" or "output"
  {"instruction": "...", "input": "...", "output": "..."}
  {"text": "..."}
  {"token_ids": [...], "prompt_length": 12}
  {"request": {...}, "response": {...}}     bodies of OpenAI's or Anthropic's API
  {"custom_id": "...", "response": {...}}   output of a batch; also give the batch's input file
  logs of LiteLLM and Langfuse; exports of ChatGPT, Claude and ShareGPT; sessions of Claude Code and Codex;
  OpenTelemetry spans with gen_ai attributes
If records have other field names, use --field. Prompts and messages are encoded exactly as the server encodes them.

If a build is interrupted, even by kill -9, the same command resumes it.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    command.add_argument("inputs", nargs="+", metavar="INPUT", help="File, pattern, directory or URL, see above")
    add_log_arguments(command)
    command.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="Cache directory to write; created if missing"
    )
    command.add_argument("--namespace", default=DEFAULT_NAMESPACE, help="Namespace of the cache (default: %(default)s)")
    command.add_argument("--force", action="store_true", help="Replace an existing cache in DIR")
    command.add_argument(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="Tokenize and sort the inputs on this machine, or on a Ray cluster (default: %(default)s)",
    )
    command.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="Address of the Ray cluster (default: $RAY_ADDRESS, or a new cluster on this machine)",
    )
    command.add_argument(
        "--jobs", type=int, metavar="N", help="Number of processes (default: one per core, or one for small inputs)"
    )
    command.add_argument("--quiet", action="store_true", help="Show no progress")


def run(options: argparse.Namespace) -> int:
    check_namespace(options.namespace)
    if options.jobs is not None and options.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {options.jobs}")
    if options.ray_address is not None and options.executor != "ray":
        raise ConfigError("--ray-address requires --executor ray")
    build_options = BuildOptions(
        namespace=options.namespace,
        tokenizer=options.tokenizer,
        chat_template=chat_template_from_options(options),
        format=options.format,
        force=options.force,
        skip_invalid=options.skip_invalid,
        fields=FieldNames.parse(options.field),
        jobs=options.jobs,
    )
    executor = None
    if options.executor == "ray":
        from cache_builder.building.ray_executor import ray_executor

        executor = ray_executor(options.ray_address)
    try:
        with progress_bar(0, "B", quiet=options.quiet) as bar:
            result = build(
                options.inputs,
                options.out,
                build_options,
                begin=lambda num_bytes: bar.reset(num_bytes or None),
                progress=lambda num_bytes, _: bar.update(num_bytes),
                executor=executor,
            )
    except BaseException:
        if (kept := find_resumable(options.out)) is not None and STANDARD_INPUT not in options.inputs:
            print(
                f"ssd-cache: finished parts are kept in {kept}; to resume the build, run the same command again",
                file=sys.stderr,
            )
        raise
    print(
        f"{options.out}: {result.num_tokens:,} tokens in {result.num_sequences:,} sequences from "
        f"{result.num_records:,} records, namespace {options.namespace}"
    )
    for lacking, what in ((result.num_without_prompt, "prompt"), (result.num_without_answer, "answer")):
        if lacking:
            print(f"  {lacking:,} of {result.num_records:,} records had no {what}")
    if result.num_without_prompt:
        print("    an answer without prompt is drafted less often: add the file of the requests, or --field prompt=...")
    if result.num_reused_tokens:
        print(f"  {result.num_reused_tokens:,} of these tokens were finished by an earlier, interrupted build")
    if result.num_skipped_prompt_tokens:
        print(f"  {result.num_skipped_prompt_tokens:,} prompt tokens were already stored, and were not stored again")
    if result.num_invalid:
        print(f"  {result.num_invalid:,} invalid lines were skipped")
    return 0
