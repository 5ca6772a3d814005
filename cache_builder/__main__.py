"""The command ``ssd-cache``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import takewhile

from cache_builder import Terminated
from ssd import __version__
from ssd.errors import SSDError

_DESCRIPTION = "Fill the retrieval cache of ssd-serve from text that exists already: logs, transcripts, documents."
_EXAMPLES = """\
examples:
  ssd-cache build answers.jsonl --tokenizer ./my-model --out warm/
  ssd-cache build docs/*.md logs.jsonl.gz --tokenizer ./my-model --out warm/ --force
  zcat transcripts.gz | ssd-cache build - --tokenizer ./my-model --out more/
  ssd-cache build calls.jsonl --field prompt=call.in --field completion=call.out --tokenizer ./my-model --out warm/
  ssd-cache inspect warm/
  ssd-cache evaluate logs.jsonl --tokenizer ./my-model --warm warm/
  ssd-cache follow tcp://engine:5557 --replay-port 5558 --tokenizer ./my-model --redis redis://localhost:6379/0
  ssd-cache inspect warm/ --deep --tokenizer ./my-model
  ssd-cache merge warm/ more/ cache/support --out merged/ --namespace support
  ssd-cache inspect warm/ --sequences | gzip > warm.jsonl.gz
  ssd-cache explain warm/ --prompt question.txt --tokenizer ./my-model
  ssd-cache push warm/ --redis redis://localhost:6379/0 --namespace default
  ssd-cache pull --redis redis://localhost:6379/0 --namespace default --out saved/
  ssd-cache purge --namespace old --redis redis://localhost:6379/0
  ssd-cache prune warm/ --budget 4M --logs logs.jsonl --tokenizer ./my-model --out small/
"""


COMMANDS = {
    "build": "build a cache directory from logs and documents",
    "evaluate": "estimate the speed-up from your own logs",
    "inspect": "show and check the contents of a cache directory",
    "follow": "learn from the KV events of running vLLM or SGLang engines",
    "merge": "merge several caches into one",
    "explain": "show the draft that follows a text, and its sources",
    "push": "copy a cache directory to the Redis stream that servers share",
    "pull": "copy the Redis stream to a cache directory",
    "redis-status": "show the contents and settings of the Redis server",
    "purge": "delete the text of a namespace from Redis",
    "prune": "shrink a cache to the text from which logged requests draft",
}
"""Maps each subcommand of ``ssd-cache`` to the line that ``--help`` shows for this subcommand."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an ``ssd-cache`` command. Returns 0 for success, 1 if the command found a fault, 2 after an error message.

    SIGTERM gives 143, and Ctrl-C gives 130. Without ``arguments``, the function reads ``sys.argv``, installs a
    handler for SIGTERM, and makes torch unimportable, so that transformers loads the tokenizer faster and in less
    memory. Only ``--against``, which compares other draft methods, needs torch.
    """
    if arguments is None:
        signal.signal(signal.SIGTERM, _raise_terminated)
        sys.unraisablehook = _raise_again
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        if arguments is None and not getattr(options, "against", ()):  # other draft methods need torch
            import_module("ssd.text.load_tokenizer").hide_torch()
        status: int = options.run(options)
        return status
    except ModuleNotFoundError as error:
        print(f"ssd-cache: error: a package is missing: pip install 'ssd-serving[builder]' ({error})", file=sys.stderr)
        return 2
    except (SSDError, OSError) as error:
        print(f"ssd-cache: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except Terminated:
        print("ssd-cache: terminated", file=sys.stderr)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        print("ssd-cache: interrupted", file=sys.stderr)
        return 130


def _raise_terminated(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # further signals are ignored, because the exit takes a moment only
    raise Terminated


def _raise_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Raise `Terminated` again 10 ms later if Python has ignored it, because SIGTERM must always end the process.

    Python only reports exceptions that are raised in finalizers (``__del__``), and passes them to
    ``sys.unraisablehook``. This function is that hook.
    """
    if isinstance(unraisable.exc_value, Terminated):
        signal.signal(signal.SIGALRM, _raise_terminated)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    elif signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:  # else an interrupted constructor caused it
        sys.__unraisablehook__(unraisable)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ssd-cache",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    words = list(takewhile(lambda word: word != "--", arguments))  # behind it are files, whatever their names
    for name, help in COMMANDS.items():
        command = commands.add_parser(
            name, help=help, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if name in arguments:
            module = import_module(f"cache_builder.commands.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
        if words[:1] == [name]:
            for option in (word.partition("=")[0] for word in words if word.startswith("--")):
                _suggest_spelling(command, option, command._option_string_actions, "option")
    if words and not words[0].startswith("-"):
        _suggest_spelling(parser, words[0], COMMANDS, "command")
    return parser.parse_args(arguments)


def _suggest_spelling(parser: argparse.ArgumentParser, word: str, known: Iterable[str], kind: str) -> None:
    """Exit with a usage message that suggests the correct spelling if a command or an option is misspelled."""
    if word not in known and (near := get_close_matches(word, known, n=1)):
        parser.error(f"unknown {kind} {word}: did you mean {near[0]}?")


if __name__ == "__main__":
    sys.exit(main())
