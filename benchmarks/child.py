"""Run an object in a child process with another Python interpreter, and call its methods from this process by name.

This file imports only the standard library, because the interpreter of the other virtual environment runs it too. Calls
and results are pickled over a private pipe, so text that a library prints to stdout cannot disturb them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
_LAST_LINES = 8
_PATIENCE_S = 60.0


class ChildError(RuntimeError):
    """The called method raised an error in the child process, which keeps running. ``kind`` is the error's type."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


class ChildEnded(ChildError):
    """The child process did not start or has ended. The message contains the last lines that it printed."""


class Child:
    """The parent's side of a child process: starts the process and sends it method calls. Not thread-safe."""

    def __init__(self, name: str, python: Path, module: str, environment: Mapping[str, str]) -> None:
        """Start ``python -m module``, a program that calls `serve`. Raises ChildEnded if ``python`` cannot be run."""
        self.name = name
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close(); a pipe that nobody drains would block
        self._pipe, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                [python, "-m", module, str(theirs.fileno())],
                cwd=ROOT,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
            )
        except OSError as error:
            self._words.close()
            raise ChildEnded(f"{name}: {python} does not run: {error}") from error
        finally:
            theirs.close()

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the object in the child process, or read an attribute, and return the result.

        The operation "open" creates the object from the arguments and must come first.

        Raises:
            ChildError: The call raised an error in the child process.
            ChildEnded: The child process has ended.
        """
        try:
            self._pipe.send((operation, arguments, named))
            is_right, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended(operation) from error
        if is_right:
            return answer
        kind, text = answer
        raise ChildError(f"{self.name}, {operation}: {kind}: {text}", kind)

    def close(self) -> None:
        """End the child process. Further calls have no effect."""
        self._pipe.close()  # it ends with that
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ended(self, operation: str) -> ChildEnded:
        if self._words.closed:
            return ChildEnded(f"{self.name} was closed")
        self._pipe.close()
        try:
            status = self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        self.close()
        said = "\n".join(f"  {line}" for line in lines) or "  nothing"
        return ChildEnded(f"{self.name} ended with status {status} during {operation!r}. Its last words:\n{said}")


def serve(make: Callable[..., Any]) -> int:
    """Create an object with ``make`` and answer the parent's calls (`Child.ask`) until it closes the pipe; return 0."""
    number = int(sys.argv[1])
    os.set_inheritable(number, False)  # a process that is started here must not keep it open
    pipe, opened = Connection(number), None
    while True:
        try:
            operation, arguments, named = pipe.recv()
        except EOFError:
            return 0
        try:
            if operation == "open":
                opened, answer = make(*arguments, **named), None
            else:
                found = getattr(opened, operation)
                answer = found(*arguments, **named) if callable(found) else found
            told: Any = True, answer
        except Exception as error:  # a library may raise anything, and who asked should hear of it
            told = False, (type(error).__name__, str(error))
        # Dropped before the next one is read: the data must not be held twice, nor be counted as the object's.
        del arguments, named
        pipe.send(told)
