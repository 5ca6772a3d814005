"""Codex and Claude Code as they are published, where they are installed: they have a command run, and go on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.failing_engine import RunningServer, SayingCodec, SayingEngine, serving

pytestmark = pytest.mark.slow
MODEL = "test-model"
COMMANDS = {"exec_command": "cmd", "Bash": "command"}
"""The tool by which each runs a command, and its argument."""


class AgentCodec(SayingCodec):
    """The model runs one command; then it repeats what came of it."""

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        if messages[-1]["role"] == "tool":
            return self.encode_prompt(f"It said: {messages[-1]['content']}")
        offered = [tool["function"]["name"] for tool in options["template_kwargs"].get("tools", ())]
        for name in [name for name in offered if name in COMMANDS]:
            arguments = json.dumps(
                {COMMANDS[name]: "echo $((6 * 7)) > made.txt && cat made.txt", "description": "Make."}
            )
            return self.encode_prompt(f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>')
        return self.encode_prompt("Hello.")


class AgentEngine(SayingEngine):
    def __init__(self) -> None:
        super().__init__("{{ tools }} <tool_call> <think>")
        self.codec, self.max_model_len = AgentCodec("{{ tools }} <tool_call> <think>"), 200_000


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(lambda _: AgentEngine()) as running:
        yield running


def run(place: Path, command: list[str], **environment: str) -> str:
    """What a program says in a directory of its own; skips where it is not installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}: npm install -g @openai/codex @anthropic-ai/claude-code")
    (place / "work").mkdir()
    known = {"PATH": os.environ["PATH"], "HOME": str(place), "SHELL": "/bin/bash", **environment}
    done = subprocess.run(
        command, cwd=place / "work", env=known, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_codex_runs_a_command(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "ssd"\n[model_providers.ssd]\nname = "ssd"\nwire_api = "responses"\n'
        f'base_url = "{server.url}/v1"\n'
    )
    command = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Make it."]
    said = run(tmp_path, command, CODEX_HOME=str(tmp_path))
    assert "It said:" in said and (tmp_path / "work" / "made.txt").read_text() == "42\n"


def test_claude_code_runs_a_command(server: RunningServer, tmp_path: Path) -> None:
    said = run(
        tmp_path,
        ["claude", "-p", "Make it.", "--model", MODEL, "--allowedTools", "Bash"],
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert "It said:" in said and (tmp_path / "work" / "made.txt").read_text() == "42\n"
