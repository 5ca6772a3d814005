"""Options of ``vllm serve`` for several devices: understood, and sent to where they are served."""

from __future__ import annotations

import pytest

from server.command.arguments import parse_arguments


@pytest.mark.parametrize("option", ["--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"])
def test_several_devices_are_refused_with_the_way_out(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_arguments([option, "1"], environment={}).model.path
    with pytest.raises(SystemExit) as stopped:
        parse_arguments([option, "2"], environment={})
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert f"{option} 2" in message and "ssd.integrations.vllm" in message and message.count("\n") == 1
