"""Training an EAGLE-3 head: it reads its own output while it learns, as it will when it drafts.

"Training-time test" (arXiv 2503.01840, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel

from ssd.bundled.training.heads.chains import unroll
from ssd.bundled.training.heads.kinds import distance
from ssd.model.heads.eagle3 import Eagle3Head

STEP_WEIGHT = 0.8
"""What a step's loss counts beside that of the step before."""


class Eagle3Training:
    """A new head for a Llama target, begun from the target's last layer, and its training."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft_ids: torch.Tensor,
        feature_layers: tuple[int, ...],
        intermediate_size: int,
    ) -> None:
        """draft_ids : int64[Vd], the target's tokens that the head can draft, ascending."""
        config = LlamaConfig.from_dict(target.config.to_dict())
        config.num_hidden_layers = 1
        config.intermediate_size = intermediate_size
        config.tie_word_embeddings = False
        config._attn_implementation = "sdpa"
        self.head = Eagle3Head(config, target.get_input_embeddings(), feature_layers, draft_vocab_size=len(draft_ids))
        self.head.map_vocabulary(draft_ids)
        self._draft_ids = draft_ids
        self._begin(target)

    @torch.no_grad()
    def _begin(self, target: PreTrainedModel) -> None:
        head, layer = self.head, target.model.layers[-1]
        size = head.feature_size
        # Features begin as the last of the hidden states; what the others add is learned.
        for weight in (head.fc.weight, *(getattr(head.midlayer.self_attn, f"{name}_proj").weight for name in "qkv")):
            torch.nn.init.normal_(weight, std=0.02)
        head.fc.weight[:, -size:] += torch.eye(size)
        for name in "qkv":
            weight = getattr(head.midlayer.self_attn, f"{name}_proj").weight
            weight[:, size:] += getattr(layer.self_attn, f"{name}_proj").weight
        head.midlayer.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight)
        inner = head.config.intermediate_size
        head.midlayer.mlp.gate_proj.weight.copy_(layer.mlp.gate_proj.weight[:inner])
        head.midlayer.mlp.up_proj.weight.copy_(layer.mlp.up_proj.weight[:inner])
        head.midlayer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight[:, :inner])
        head.midlayer.hidden_norm.load_state_dict(layer.input_layernorm.state_dict())
        head.midlayer.post_attention_layernorm.load_state_dict(layer.post_attention_layernorm.state_dict())
        head.norm.load_state_dict(target.model.norm.state_dict())
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[self._draft_ids])

    def loss(self, tokens: torch.Tensor, hidden: list[torch.Tensor], logits: torch.Tensor, depth: int) -> torch.Tensor:
        """Distance over the tokens that can be drafted, later steps counted less."""
        features = self.head.combine([states[:, :-1] for states in hidden])
        wanted = torch.softmax(logits[:, 1:, self._draft_ids], -1)
        total, weights = torch.zeros(()), 0.0
        for step, drafted in enumerate(unroll(self.head, tokens[:, 1:], features, depth, None)):
            weight = STEP_WEIGHT**step
            total = total + weight * distance(drafted[:, step:], wanted[:, step:])
            weights += weight
        return total / weights

    def files(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The layout of the EAGLE repository."""
        head = self.head
        kept = (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size"),
            *("attention_bias", "bos_token_id", "eos_token_id", "pad_token_id"),
        )
        described = head.config.to_dict()
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{name: described[name] for name in kept},
            "draft_vocab_size": len(self._draft_ids),
            "eagle_config": {
                # Counted from the first layer, 0, by what comes out of it.
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in head.feature_layers],
                "use_aux_hidden_state": True,
            },
        }
        return config, dict(head.state_dict())
