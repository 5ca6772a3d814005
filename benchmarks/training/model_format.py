"""The files of the bundled model other than its weights' values: shape, vocabulary, chat template, saving."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

END_OF_TEXT = "<|endoftext|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = [END_OF_TEXT, *ROLES.values()]
END_OF_TEXT_ID = 0
VOCABULARY_SIZE = 4096
MAX_POSITIONS = 2048

# A turn is its role's token and its text; the assistant's turn ends with end-of-text, the model's only stop signal.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('Roles are system, user and assistant, got ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] -}}
{%- if message['role'] == 'assistant' -%}{{- '<|endoftext|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as the chat template takes it."""

    role: str
    content: str


def render(messages: Iterable[Message]) -> str:
    """What ``CHAT_TEMPLATE`` renders, without Jinja."""
    return "".join(
        ROLES[message.role] + message.content + (END_OF_TEXT if message.role == "assistant" else "")
        for message in messages
    )


def model_config() -> LlamaConfig:
    """Shape of the model: 5.4 million parameters, so that weights of two bytes stay under 11 MB."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
        attn_implementation="sdpa",
    )


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE over GPT-2's pieces, every digit a token of its own. Decoding gives back every text exactly."""
    tokenizer = Tokenizer(models.BPE())
    # Numbers of many digits would each be a rare token, or a run of the same token: both invite loops.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write a model directory in float16. Each file is replaced in one step: a reader sees the old or the new one."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".saving-") as folder:
        new = Path(folder)
        half = LlamaForCausalLM(model.config).half()
        half.load_state_dict(model.state_dict())
        half.generation_config = GenerationConfig(eos_token_id=END_OF_TEXT_ID, pad_token_id=END_OF_TEXT_ID)
        half.save_pretrained(new)
        # Stored in two bytes, computed in four: on a CPU that is faster, and a plain `from_pretrained` then does it.
        config = json.loads((new / "config.json").read_text())
        (new / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")
        tokenizer.save(str(new / "tokenizer.json"))
        (new / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(), indent=2) + "\n")
        (new / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        for file in new.iterdir():
            file.chmod(0o644)
            file.replace(out / file.name)


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(ROLES.values()),
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
