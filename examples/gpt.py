"""A GPT in PyTorch, with its attention as an argument, and the attentions to give it.

GPT-2's layers, but for rotary positions in place of learned ones: a small model learns several
times as fast with them, and no context has a longest position.

Every attention is a function of q, k, v (batch, seqlen, num_heads, head_dim) that returns out of
the same shape, causal. They compute the same thing; what differs is time, memory and rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


# ---- attentions ----------------------------------------------------------------------------------


def flash_ext_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_ext.attention(q, k, v, causal=True)


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook: scores and probabilities (batch, num_heads, seqlen, seqlen) written out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    p = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).to(v.dtype)
    return (p @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None = None) -> Tensor:
    """torch's scaled_dot_product_attention: its own choice of a backend, or this one alone."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if backend is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2)


@functools.cache
def _compiled_flex(seqlen: int, device: torch.device) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(_batch, _head, i, j):
        return j <= i

    mask = create_block_mask(sees, None, None, seqlen, seqlen, device=device)
    return functools.partial(torch.compile(flex_attention), block_mask=mask)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's flex_attention, compiled, with a causal block mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _compiled_flex(q.shape[2], q.device)(q, k, v).transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {
    "naive": naive,
    "sdpa": sdpa,
    "sdpa_flash": functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "flex": flex,
    "flash_ext": flash_ext_attention,
}


# ---- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """GPT-2's smallest size by default: 124 million parameters."""

    vocab_size: int = 50304  # 50257, rounded up to a multiple of 64
    context: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    head_dim: int = 64

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def matmul_parameters(self) -> int:
        """Weights that every token is multiplied by: the layers' and the output's."""
        return 12 * self.num_layers * self.width**2 + self.vocab_size * self.width

    @property
    def flops_per_token(self) -> int:
        """Of training: three times the forward's, and what a backward recomputes does not count.

        The forward has two a weight, and in attention two products of 2 * width for each visible
        key; with a causal mask half the context is visible on average.
        """
        attention = self.num_layers * 2 * 2 * self.width * self.context // 2
        return 3 * (2 * self.matmul_parameters + attention)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021): pairs of dimensions of x turn by their row's angles.

    x (batch, seqlen, num_heads, head_dim); cos, sin (seqlen, 1, head_dim / 2), fp32.
    """
    first, second = x.chunk(2, dim=-1)
    turned = [first * cos - second * sin, first * sin + second * cos]
    return torch.cat(turned, dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm, over hidden states (batch, seqlen, width)."""

    def __init__(self, config: Config, attend: Attention) -> None:
        super().__init__()
        width = config.width
        self.attend, self.head_dim = attend, config.head_dim
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        packed = self.qkv(self.norm_attention(hidden)).unflatten(-1, (3, -1, self.head_dim))
        q, k, v = packed.unbind(2)
        out = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        hidden = hidden + self.project(out.flatten(2))
        return hidden + self.contract(F.gelu(self.expand(self.norm_mlp(hidden))))


class GPT(nn.Module):
    """Tokens (batch, seqlen) to logits (batch, seqlen, vocab_size); the same seed, the same model.

    attend: one of ATTENTIONS, or any function of that form.
    """

    def __init__(self, config: Config, attend: Attention) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        frequencies = 1e4 ** -torch.linspace(0, 1, config.head_dim // 2 + 1)[:-1]
        angles = torch.arange(config.context)[:, None, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's: what is added to the hidden states starts smaller, the deeper the model.
                adds = name.endswith(("project.weight", "contract.weight"))
                std = 0.02 * (2 * config.num_layers) ** -0.5 if adds else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        hidden = self.token(tokens)
        for block in self.blocks:
            hidden = block(hidden, cos, sin)
        return F.linear(self.norm(hidden), self.token.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats; targets (batch, seqlen)."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float, generator) -> Tensor:
        """tokens (1, seqlen) and `count` more, one at a time."""
        for _ in range(count):
            logits = self(tokens[:, -self.config.context :])[:, -1].float() / temperature
            p = logits.softmax(dim=-1).cpu()
            drawn = torch.multinomial(p, 1, generator=generator).to(tokens.device)
            tokens = torch.cat([tokens, drawn], dim=1)
        return tokens
