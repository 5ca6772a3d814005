"""Whether a chat template can be read, without a model or a tokenizer."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``, with which some templates mark what the model says."""

    tags = {"generation"}  # noqa: RUF012  # as the base class has it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """What is within."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def parse_template(text: str) -> None:
    """Raise jinja2's TemplateSyntaxError where transformers could not compile ``text`` as a chat template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.compile(text)
