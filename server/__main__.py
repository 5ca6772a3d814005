"""The command ``python -m server`` and the console script ``ssd-serve``."""

from __future__ import annotations

import faulthandler
import re
import sys
from pathlib import Path

from server.observe.logs import report_start, set_up_logging, wants_json

_SHOWN_KEY = re.compile(rb"(?<=\0--api-key[=\0])[^\0]+")


def main() -> int:
    faulthandler.enable(2)  # standard error: if native code crashes, the log says what each thread was doing
    if wants_json(sys.argv[1:]):  # errors in other options are then JSON lines, too
        set_up_logging("info", "json")
    hide_keys()  # before other imports, because API keys are visible in the process list until then
    from server.command.arguments import parse_arguments

    words = sys.argv[1:]
    is_check = words[:1] == ["doctor"]  # a directory of that name is ./doctor
    options = parse_arguments(words[is_check:])  # before the slow imports, so that help appears at once
    if is_check:
        from server.command.doctor import main as start
    else:
        from server.command.start import main as start
    return start(options)


def hide_keys() -> None:
    """Overwrite API keys in the process's command line, which all users of the machine can read."""
    if not any(word.partition("=")[0] == "--api-key" for word in sys.argv):
        return
    try:
        begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            memory.seek(begin)
            line = memory.read(end - begin)
            memory.seek(begin)
            memory.write(_SHOWN_KEY.sub(lambda key: b"*" * len(key[0]), line))
    except (OSError, ValueError):  # the system has no such file, or it cannot be written
        report_start("warning", "other users can read --api-key in the process list: use --api-key-file")


if __name__ == "__main__":
    sys.exit(main())
