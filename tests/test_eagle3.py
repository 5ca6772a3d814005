"""The head of EAGLE-3: equal to arithmetic written out, in one pass and through the slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from ssd.model.heads.networks import Eagle3Head
from ssd.model.kv.attention import ATTENTION_NAME
from ssd.model.kv.kv_cache import SlotKVCache, SlotRows
from tests.reference.heads import eagle3_pass

HIDDEN, LENGTH = 16, 7


def small_head(norm_before_residual: bool = False, draft_vocab_size: int = 20) -> Eagle3Head:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        attn_implementation="sdpa",
    )
    embeddings = torch.nn.Embedding(50, HIDDEN)
    head = Eagle3Head(
        config, embeddings, (1, 2, 3), draft_vocab_size=draft_vocab_size, norm_before_residual=norm_before_residual
    )
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return head.requires_grad_(False)


def text() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, hidden states and positions of one row."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50, (1, LENGTH), generator=generator)
    return tokens, torch.randn(3, 1, LENGTH, HIDDEN, generator=generator), torch.arange(LENGTH)[None]


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_a_pass_equals_the_arithmetic_written_out(norm_before_residual: bool) -> None:
    head = small_head(norm_before_residual)
    tokens, hidden, positions = text()
    features = head.combine(list(hidden))
    logits, outgoing = head(tokens, features, positions)
    embedded = head._embed[0](tokens)
    pairs = torch.cat([embedded, features], dim=-1)[0]
    for t in range(LENGTH):
        expected = eagle3_pass(
            head.state_dict(),
            embedded[0, t],
            features[0, t],
            list(pairs[:t]),
            num_heads=4,
            rope_theta=10_000.0,
            eps=head.config.rms_norm_eps,
            norm_before_residual=norm_before_residual,
        )
        torch.testing.assert_close(logits[0, t], expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(outgoing[0, t], expected[1], rtol=1e-4, atol=1e-4)


def test_slots_give_what_a_plain_pass_gives() -> None:
    head = small_head()
    tokens, hidden, positions = text()
    features = head.combine(list(hidden))
    whole, _ = head(tokens, features, positions)
    head.config._attn_implementation = ATTENTION_NAME
    cache = SlotKVCache(2, 32, torch.device("cpu"))
    for part in (slice(0, 4), slice(4, 5), slice(5, 7)):
        rows = SlotRows.build(cache, [1], part.stop - part.start, torch.device("cpu"), None)
        logits, _ = head(tokens[:, part], features[:, part], positions[:, part], slot_rows=rows)
        cache.lengths[[1]] += np.asarray([part.stop - part.start])
        torch.testing.assert_close(logits, whole[:, part], rtol=1e-4, atol=1e-5)


def test_two_bytes_a_weight_leave_angles_and_ids_exact() -> None:
    head = small_head()
    head.map_vocabulary(torch.arange(30, 50))
    frequencies = head.rotary.inv_freq.clone()
    head.to(torch.bfloat16)
    assert torch.equal(head.rotary.inv_freq, frequencies)
    assert head.draft_to_target is not None and torch.equal(head.draft_to_target, torch.arange(30, 50))
    tokens, hidden, positions = text()
    logits, outgoing = head(tokens, head.combine(list(hidden.bfloat16())), positions)
    assert logits.dtype == outgoing.dtype == torch.bfloat16
