"""The training data of the bundled model and its draft head: Python's standard library as files and conversations."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = [END_OF_TEXT, *ROLES.values()]
END_OF_TEXT_ID = 0

# Left out: tests and example programs, tables written by generators, text that is not Python, foreign packages, and
# the parts that distributors move into packages of their own.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "pydoc_data", "encodings", "turtledemo", "lib2to3", "ensurepip", "site-packages"}
)
MAX_FILE_BYTES = 400_000
HELD_OUT_ONE_IN = 24
"""One file in this many, chosen by the hash of its path, is never trained on."""
MAX_ANSWER_LINES = 40
CONVERSATION_PERCENT = 45
"""The percentage of documented functions that are also turned into conversations."""
SYSTEM_MESSAGES = ("You are a helpful assistant.", "You write Python code.", "Answer with Python source code only.")


Message = tuple[str, str]
"""The role and the content of a message."""


def render(messages: Iterable[Message]) -> str:
    """Render messages as the model's ``CHAT_TEMPLATE`` does, without Jinja."""
    return "".join(ROLES[role] + content + (END_OF_TEXT if role == "assistant" else "") for role, content in messages)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the standard library."""

    path: str
    """The path below the standard library's directory, with forward slashes."""
    text: str
    held_out: bool


def is_held_out(path: str) -> bool:
    """Return whether this file is held out for evaluation. This depends on its relative path only."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def standard_library() -> list[SourceFile]:
    """Read the standard library of the running interpreter, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        # `config-3.11-...` and `_sysconfigdata_...` describe how one interpreter was built, and where.
        if any(part in SKIPPED_FOLDERS or part.startswith(("config-", "_sysconfigdata")) for part in relative.parts):
            continue
        if file.stat().st_size < MAX_FILE_BYTES:
            path = relative.as_posix()
            files.append(SourceFile(path, file.read_text("utf-8", "replace"), is_held_out(path)))
    return files


def conversations(file: SourceFile) -> Iterator[list[Message]]:
    """Yield conversations in which a user asks for a documented function of the file and gets its source code.

    A hash of the source decides which functions are used, how the question is worded and whether two functions share a
    conversation, so the same file always gives the same conversations.
    """
    pending: list[Message] = []
    for function, docstring, source in _documented_functions(file.text):
        number = int.from_bytes(hashlib.sha256(f"{file.path}\0{source}".encode()).digest()[:8], "big")
        if number % 100 >= CONVERSATION_PERCENT:
            continue
        number //= 100
        if not pending and number % 4 == 0:
            pending.append(("system", SYSTEM_MESSAGES[number // 4 % len(SYSTEM_MESSAGES)]))
        number //= 64
        pending += [("user", _question(function, docstring, number)), ("assistant", source)]
        # Four in five end here; the others go on with the next function of the file.
        if number // 4 % 5 or len(pending) > 4:
            yield pending
            pending = []
    if pending:
        yield pending


def _documented_functions(text: str) -> Iterator[tuple[ast.FunctionDef, str, str]]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node)
        last_line = node.end_lineno or node.lineno
        if docstring and 2 <= last_line - node.lineno < MAX_ANSWER_LINES:
            yield node, docstring, textwrap.dedent("".join(lines[node.lineno - 1 : last_line])).rstrip("\n")


def _question(function: ast.FunctionDef, docstring: str, number: int) -> str:
    summary = " ".join(docstring.split("\n\n")[0].split())
    signature = f"def {function.name}({ast.unparse(function.args)}):"
    return (
        f"Write `{function.name}`: {summary}",
        f"Write a Python function. {summary}",
        f'Complete this function:\n{signature}\n    """{summary}"""',
        f"Write a function `{function.name}`. {summary}",
    )[number % 4]


class TokenStream:
    """The training documents, concatenated in a new random order each epoch and cut into rows in random order.

    The rows of a step come from different documents. Neighbouring rows are so similar that a step on them alone learns
    little (measured: 2.47 held-out bits per byte after a million tokens taken in order).
    """

    def __init__(self, documents: list[npt.NDArray[np.int64]], seed: int, num_tokens: int) -> None:
        self._documents = documents
        self._seed = seed
        self._num_tokens = num_tokens
        self.tokens_per_epoch = sum(map(len, documents))
        self._steps_per_epoch = (self.tokens_per_epoch - 1) // num_tokens
        self._epoch = -1
        self._tokens = np.zeros(0, np.int64)

    def batch(self, step: int, row_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of a step, int64[num_tokens / row_length, row_length] each."""
        epoch, index = divmod(step, self._steps_per_epoch)
        if epoch != self._epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._documents))
            self._tokens = np.concatenate([self._documents[i] for i in order])
            self._epoch = epoch
        num_rows = self._num_tokens // row_length
        deal = np.random.default_rng([self._seed, epoch, row_length]).permutation((len(self._tokens) - 1) // row_length)
        starts = deal[index * num_rows : (index + 1) * num_rows] * row_length
        rows = torch.from_numpy(self._tokens[starts[:, None] + np.arange(row_length + 1)])
        return rows[:, :-1], rows[:, 1:]


MAX_PREFIX_TOKENS = 48


class Prefixes:
    """Prompts from which the model generates text for its training: random pieces of documents, or questions."""

    def __init__(self, documents: list[npt.NDArray[np.int64]], seed: int, num_rows: int) -> None:
        self._documents = documents
        self._seed = seed
        self._num_rows = num_rows
        assistant = SPECIAL_TOKENS.index("<|assistant|>")
        self._questions = [document[: np.argmax(document == assistant) + 1] for document in documents]
        self._questions = [question for question in self._questions if 1 < len(question) <= MAX_PREFIX_TOKENS]
        self._weights = np.array([len(document) for document in documents], np.float64)
        self._weights /= self._weights.sum()

    def batch(self, step: int) -> torch.Tensor:
        """Return prompts of equal length, int64[num_rows, length]. They depend on the seed and the step only."""
        random = np.random.default_rng([self._seed, 1, step])
        length = int(random.integers(4, MAX_PREFIX_TOKENS + 1))
        # Every fourth step asks questions, cut at the front to the same length.
        if step % 4 == 3:
            fitting = [question for question in self._questions if len(question) >= length]
            if len(fitting) >= self._num_rows:
                chosen = random.choice(len(fitting), self._num_rows, replace=False)
                return torch.from_numpy(np.stack([fitting[i][-length:] for i in chosen]))
        rows: list[npt.NDArray[np.int64]] = []
        while len(rows) < self._num_rows:
            document = self._documents[random.choice(len(self._documents), p=self._weights)]
            if len(document) > length:
                start = int(random.integers(0, len(document) - length))
                rows.append(document[start : start + length])
        return torch.from_numpy(np.stack(rows))


def training_documents(files: list[SourceFile], tokenizer: Tokenizer) -> list[npt.NDArray[np.int64]]:
    """Tokenize every file that is not held out, and its conversations; each document ends in end-of-text."""
    texts = []
    for file in files:
        if not file.held_out:
            texts.append(file.text + END_OF_TEXT)
            texts.extend(render(messages) for messages in conversations(file))
    return [np.array(encoding.ids, np.int64) for encoding in tokenizer.encode_batch(texts)]


def held_out_documents(files: list[SourceFile], tokenizer: Tokenizer) -> tuple[list[npt.NDArray[np.int64]], int]:
    """Tokenize every held-out file. Returns the token ids and their total number of bytes, without end-of-text."""
    held = [file for file in files if file.held_out]
    documents = [np.array(tokenizer.encode(file.text + END_OF_TEXT).ids, np.int64) for file in held]
    return documents, sum(len(file.text.encode()) for file in held)
