"""Multi-head latent attention with its up-projections, decompressed and absorbed: equal.

The decompressed form is what the model is defined by (DeepSeek-V2, arXiv 2405.04434, equations
9 to 19): plain attention of Hq heads over K and V that are projected up from the latents. The
absorbed form (section 2.1.2) leaves the latents as they are: `absorb` takes the projection of K
into the queries, and `project_values` applies that of V to the outputs.

More letters: R elements of a latent, P of a rope key, Dn of a query head without its rope part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class UpProjections:
    """key: `[Hq, Dn, R]` (W_UK of each head), value: `[Hq, Dv, R]` (W_UV)."""

    key: torch.Tensor
    value: torch.Tensor


def decompressed_attention(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    rope_keys: torch.Tensor,
    projections: UpProjections,
    scale: float,
) -> torch.Tensor:
    """Causal attention of the last T of the n tokens of one sequence, head by head.

    q_nope: `[T, Hq, Dn]`, q_rope: `[T, Hq, P]`, latents: `[n, R]`, rope_keys: `[n, P]`, of any
    dtype. Returns `[T, Hq, Dv] float64`.
    """
    num_tokens, num_heads, _ = q_nope.shape
    n = len(latents)
    out = torch.empty(num_tokens, num_heads, projections.value.shape[1], dtype=torch.float64)
    for head in range(num_heads):
        keys = latents.double() @ projections.key[head].double().T
        keys = torch.cat([keys, rope_keys.double()], dim=1)
        values = latents.double() @ projections.value[head].double().T
        queries = torch.cat([q_nope[:, head], q_rope[:, head]], dim=1).double()
        for token in range(num_tokens):
            seen = n - num_tokens + token + 1
            weights = torch.softmax(scale * (keys[:seen] @ queries[token]), dim=0)
            out[token, head] = weights @ values[:seen]
    return out


def absorb(q_nope: torch.Tensor, q_rope: torch.Tensor, projections: UpProjections) -> torch.Tensor:
    """The queries of attention over latents: `[T, Hq, R + P] float64`."""
    q_latent = torch.einsum("thd,hdr->thr", q_nope.double(), projections.key.double())
    return torch.cat([q_latent, q_rope.double()], dim=2)


def project_values(out: torch.Tensor, projections: UpProjections) -> torch.Tensor:
    """Outputs `[T, Hq, R]` of attention over latents as outputs of heads: `[T, Hq, Dv] float64`."""
    return torch.einsum("thr,hdr->thd", out.double(), projections.value.double())
