"""A small causal transformer over characters, made of blocks: each takes the one before's output and nothing else."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

DROPOUT = 0.1
"""Read in every forward. A sweep may set it (``model.DROPOUT = 0.2``) before training starts."""

VOCABULARY = 128
"""Characters are ASCII codes."""


class Embed(nn.Module):
    """Codes (rows, length) to vectors (rows, length, width): character plus position."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(context, width))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        vectors = self.characters(codes) + self.positions[: codes.shape[1]]
        return functional.dropout(vectors, DROPOUT, self.training)


class TransformerBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + functional.dropout(self.attend(self.attention_norm(x)), DROPOUT, self.training)
        return x + functional.dropout(self.feed_forward(self.feed_forward_norm(x)), DROPOUT, self.training)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        query, key, value = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=DROPOUT if self.training else 0.0, is_causal=True
        )
        return self.attention_out(mixed.transpose(1, 2).reshape(rows, length, width))


class Head(nn.Module):
    """Vectors (rows, length, width) to logits (rows, length, VOCABULARY)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x))


class CharTransformer(nn.Module):
    """``depth`` transformer blocks between an embedding and a head: ``depth + 2`` blocks for the pipeline."""

    def __init__(self, *, depth: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed = Embed(width, context)
        self.layers = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.head = Head(width)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.embed(codes)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
