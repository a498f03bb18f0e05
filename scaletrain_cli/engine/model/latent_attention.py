"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), with the names of Hugging Face's files.

Queries come from a latent of each token, keys and values from another one; beside it one rotated key serves all heads.
The latents are whole on every tensor rank, and the layers that read them are sharded over the heads.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.model.attention import AttentionSettings, TokenContext, attention_core
from scaletrain_cli.engine.model.norm import RMSNorm
from scaletrain_cli.engine.model.rope import Tables, rotate
from scaletrain_cli.spec import ModelSpec

_LATENT_NORM_EPS = 1e-6  # fixed in transformers and in DeepSeek's own code, whatever the other norms have


class LatentAttention(nn.Module):
    """Causal multi-head latent attention, [batch, length, hidden] in and out.

    ``share_key``: applied to the rotated key before all heads of this rank read it.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden, heads, latent = spec.hidden_size, spec.num_attention_heads, spec.kv_lora_rank
        self.plain, self.rotated = spec.head_dim, spec.qk_rope_head_dim  # channels of a query or key
        self.value, self.latent = spec.value_head_dim, latent
        self.interleaved = spec.rope_interleave
        self.compresses_queries = spec.q_lora_rank > 0
        if self.compresses_queries:
            self.q_a_proj = nn.Linear(hidden, spec.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(spec.q_lora_rank, _LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(spec.q_lora_rank, heads * spec.qk_head_dim, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, heads * spec.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent + self.rotated, bias=False)
        self.kv_a_layernorm = RMSNorm(latent, _LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(latent, heads * (self.plain + self.value), bias=False)
        self.o_proj = nn.Linear(heads * self.value, hidden, bias=False)
        self.core = attention_core(spec.attention_dropout, AttentionSettings(scale=spec.attention_scale))
        self.share_key: Callable[[Tensor], Tensor] = lambda key: key

    def forward(self, x: Tensor, tables: tuple[Tables, Tables], context: TokenContext) -> Tensor:
        """``tables``: of layers with full attention, and of layers with a window, which latent attention has not."""
        batch, length, _ = x.shape
        if self.compresses_queries:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            query = self.q_proj(x)
        latent, key = self.kv_a_proj_with_mqa(x).split((self.latent, self.rotated), dim=-1)
        keys_and_values = self.kv_b_proj(self.kv_a_layernorm(latent))
        # Joined in the order of memory, [batch, length, heads, channels]: attention's output then needs no copy.
        query = query.view(batch, length, -1, self.plain + self.rotated)
        keys_and_values = keys_and_values.view(batch, length, -1, self.plain + self.value)
        rotated_key = self._rotate(self.share_key(key).unsqueeze(2), tables[0]).expand(-1, -1, query.shape[2], -1)
        plain_query, rotated_query = query.split((self.plain, self.rotated), dim=-1)
        plain_key, value = keys_and_values.split((self.plain, self.value), dim=-1)
        query = torch.cat((plain_query, self._rotate(rotated_query, tables[0])), dim=-1)
        rows = torch.cat((plain_key, rotated_key), dim=-1)
        # contiguous: saved for the backward pass without the keys before their rotation
        mixed = self.core(*(part.transpose(1, 2) for part in (query, rows, value.contiguous())), context)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]

    def _rotate(self, x: Tensor, tables: Tables) -> Tensor:
        """Return the channels [batch, length, heads, rotated] after their rotation, in the order of ``rotate``.

        The order of the channels is the same for queries and keys, so that it does not change their products.
        """
        if self.interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        return rotate(x.transpose(1, 2), tables).transpose(1, 2)
