"""The Llama-style decoder on plain local tensors. It knows nothing of meshes; parallelism uses its seams:
layers, embedding and head that may be absent, `Attention.attend`, `Head.reducer`, `Transformer.attention_mask`,
`Transformer.sequence_parts`, those of `MoE`, and positions and documents as arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config.schema import ModelConfig
from titanlite.model.attention import Attention, document_mask, rope_inverse_frequencies, rope_tables
from titanlite.model.layers import MLP, Embedding, Linear, RMSNorm
from titanlite.model.loss import IDENTITY, VocabularyReducer, cross_entropy_sum
from titanlite.model.moe import MoE


class Block(nn.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)). The unit of FSDP, compile and checkpointing.

    index: of the layer in the whole model, which says whether its mlp is dense or a mixture of experts.

    cos and sin are fp32 whatever x is: a wrapper must not cast the inputs of forward (FSDP: cast_forward_inputs=False).
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MoE(config) if config.is_moe_layer(index) else MLP(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        assert cos.dtype == sin.dtype == torch.float32, "rotary tables in less than fp32 are wrong at long positions"
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """Hidden states and the output matrix -> loss or logits. Holds no parameter: the matrix may be the embedding's.

    With a vocabulary split over ranks, `reducer` combines them and `vocab_start` is the first row of this rank.
    """

    def __init__(self, vocab_size: int, loss_chunk_tokens: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.loss_chunk_tokens = loss_chunk_tokens
        self.reducer: VocabularyReducer = IDENTITY
        self.vocab_start = 0

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
        if labels is None:
            rows = min(weight.shape[0], max(0, self.vocab_size - self.vocab_start))
            return F.linear(x, weight[:rows].to(x.dtype))
        return cross_entropy_sum(
            x.flatten(0, -2),
            weight,
            labels.flatten(),
            vocab_size=self.vocab_size,
            chunk_tokens=self.loss_chunk_tokens,
            reducer=self.reducer,
            vocab_start=self.vocab_start,
        )


def attention_mask(documents: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The mask of a forward pass, which all layers share; None where each token sees all tokens before it."""
    return None if documents is None else document_mask(documents, dtype)


class Transformer(nn.Module):
    """Llama 3 (Grattafiori et al. 2024) as ModelConfig describes it, or the part of it that a pipeline stage holds.

    compute_dtype: dtype of the activations. loss_chunk_tokens: as in cross_entropy_sum. layers: global indices of the
    layers held here (default all). Weights are uninitialised: use init.py. After meta -> to_empty, init_buffers.
    sequence_parts: tensor-parallel ranks that share a sequence's hidden states, each [B, S / parts, dim]; all of them
    have all S tokens, labels, positions and documents.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        compute_dtype: torch.dtype = torch.float32,
        loss_chunk_tokens: int = 0,
        layers: range | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.has_embedding = has_embedding
        self.has_head = has_head
        self.sequence_parts = 1
        rows = config.padded_vocab_size
        # A tied head without the embedding (last pipeline stage) holds its own copy of the table under the same name.
        needs_table = has_embedding or (has_head and config.tie_word_embeddings)
        self.embedding = Embedding(rows, config.dim, compute_dtype) if needs_table else None
        indices = range(config.n_layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(index): Block(config, index) for index in indices})
        self.norm = RMSNorm(config.dim, config.norm_eps) if has_head else None
        self.output = Linear(config.dim, rows) if has_head and not config.tie_word_embeddings else None
        self.head = Head(config.vocab_size, loss_chunk_tokens) if has_head else None
        self.attention_mask: Callable[[Tensor | None, Tensor, torch.dtype], Tensor | None] = attention_mask
        self.register_buffer("rope_frequencies", torch.empty(config.resolved_head_dim // 2), persistent=False)
        if not self.rope_frequencies.is_meta:
            self.init_buffers(self.rope_frequencies.device)

    rope_frequencies: Tensor

    def init_buffers(self, device: torch.device | str) -> None:
        """Give buffers their first values: rotary frequencies, on `device`; biases and counters of experts, zero."""
        self.rope_frequencies = rope_inverse_frequencies(self.config).to(device)
        for layer in moe_layers(self).values():
            layer.init_buffers()

    def forward(
        self,
        tokens_or_h: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Loss, logits or hidden states.

        tokens_or_h: [B, S] int64 token ids, or [B, S, dim] hidden states where the embedding is absent.
        labels: [B, S] int64, -100 ignored. Given: returns the fp32 scalar sum of the cross-entropies of the others.
        positions: [S] or [B, S] int, default 0..S-1; they turn the rotary angles only, attention goes by row order.
        documents: [B, S] int, the document of its row that each token is in. Given: attention stays within documents.
        Returns logits [B, S, vocab_size] without labels, hidden states [B, S, dim] without a head. Raises ValueError
        when labels are given and the head is absent.
        """
        if labels is not None and not self.has_head:
            raise ValueError("labels were given to a stage without head; give them to the last stage")
        if self.has_embedding:
            assert self.embedding is not None
            h = self.embedding(tokens_or_h)
        else:
            h = tokens_or_h.to(self.compute_dtype)
        if positions is None:
            positions = torch.arange(h.shape[1] * self.sequence_parts, device=h.device)
        cos, sin = rope_tables(positions, self.rope_frequencies)
        mask = self.attention_mask(documents, positions, self.compute_dtype)
        for block in self.layers.values():
            h = block(h, cos, sin, mask)
        if self.head is None or self.norm is None:
            return h
        table = self.embedding if self.output is None else self.output
        assert table is not None
        return self.head(self.norm(h), table.weight, labels)


def moe_layers(model: Transformer) -> dict[int, MoE]:
    """The layers with experts, by their index in the whole model."""
    return {int(name): block.mlp for name, block in model.layers.items() if isinstance(block.mlp, MoE)}
