"""Plain HTTP for tests that look at the wire."""

from __future__ import annotations

import http.client
import json
import subprocess
from contextlib import closing
from typing import Any

import anthropic
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import PATIENCE_S, START_S
from tests.waiting import wait_until as wait_until


class Answer:
    """Status, headers and body of one response."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.content = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> dict[str, Any]:
        body: dict[str, Any] = self.json["error"]
        assert set(body) == {"message", "type", "param", "code"}
        return body

    @property
    def events(self) -> list[Any]:
        """The data of each server-sent event, the end mark excluded; it must be there, and last."""
        blocks = [block for block in self.content.decode().split("\n\n") if block and not block.startswith(":")]
        assert blocks[-1] == "data: [DONE]"
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def ask(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    timeout: float = PATIENCE_S,
) -> Answer:
    """One request on a connection of its own; ``body`` is sent as JSON unless it is bytes."""
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)) as connection:
        connection.request(method, path, content, {"content-type": "application/json", **(headers or {})})
        return Answer(connection.getresponse())


def post(port: int, path: str, body: Any, **options: Any) -> Answer:
    """POST of a JSON body."""
    return ask(port, "POST", path, body, **options)


def greedy_completion(port: int, **fields: Any) -> Answer:
    """A greedy completion, which must succeed."""
    answer = post(port, "/v1/completions", {"temperature": 0, **fields})
    assert answer.status == 200, answer.content
    return answer


def official_client(port: int, key: str = "none") -> openai.OpenAI:
    """OpenAI's own client, which fails at once where a request does. To be closed."""
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


def claude_client(port: int, key: str = "none") -> anthropic.Anthropic:
    """Anthropic's own client, likewise."""
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key=key, max_retries=0, timeout=PATIENCE_S)


def bearer(key: str) -> dict[str, str]:
    """The header that brings a key."""
    return {"authorization": f"Bearer {key}"}


def get(port: int, path: str, **options: Any) -> Answer:
    """GET."""
    return ask(port, "GET", path, **options)


def metric(port: int, name: str, **labels: str) -> float:
    """The sum over all samples of a name that have these labels."""
    families = text_string_to_metric_families(get(port, "/metrics").content.decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return float(sum(sample.value for sample in samples if labels.items() <= sample.labels.items()))


def answers(port: int, path: str) -> bool:
    """Whether a server answers there and all is well."""
    try:
        return get(port, path, timeout=PATIENCE_S).status == 200
    except (OSError, http.client.HTTPException):
        return False


def drafts(port: int) -> bool:
    """Whether a server takes requests and drafts for them: it may answer before its kernels are compiled."""
    return answers(port, "/health") and "kernels are" not in get(port, "/health").json["speculation"]["reason"]


def until_ready(port: int, process: subprocess.Popen[Any] | None = None) -> None:
    """Wait until a server takes requests and drafts; fails at once where its process has ended."""
    wait_until(lambda: drafts(port) or (process is not None and process.poll() is not None), START_S)
    assert process is None or process.poll() is None, "the server ended"
