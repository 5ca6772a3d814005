"""Small tokenizers trained on the spot, and the real ones where they are."""

from __future__ import annotations

import os
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'developer' -%}{{- raise_exception('no developers here') -}}{%- endif -%}"
    "{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
_CORPUS = [Path(__file__).read_text(), "naïve café, 你好 мир 😀 wörld\n" * 3]
_SPECIAL = ["<|end|>", "<|begin|>", "<|system|>", "<|user|>", "<|assistant|>"]


def byte_level_tokenizer(num_tokens: int = 400) -> Tokenizer:
    """Every byte and some merges, with a beginning-of-text that prompts get."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    return tokenizer


def sentencepiece_like_tokenizer() -> Tokenizer:
    """Words begin with a mark that stands for a space, and unknown characters spelled by bytes, as in Llama 2."""
    words = ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab", "c", "\u2581c", "d", "<0x0A>x"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + words:
        vocabulary[token] = len(vocabulary)
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581", "ab"), ("\u2581", "c")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_model_directory(path: Path, *, chat_template: str | None = CHAT_TEMPLATE, num_tokens: int = 400) -> Path:
    """What a model directory holds of its tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer(num_tokens).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|begin|>"}'
    )
    (path / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template)
    return path


def real_tokenizers() -> list[Path]:
    """Directories with a tokenizer.json below $SSD_TOKENIZERS; none where it is not set."""
    root = os.environ.get("SSD_TOKENIZERS")
    return sorted(path.parent for path in Path(root).glob("*/tokenizer.json")) if root else []
