"""Attention of one layer: projections, rotary positions, and the injected `attend`."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from conf.schema import ModelConfig
from model.norm import RMSNorm
from model.rope import rotate

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # attend(q, k, v, plan) -> out, all [B, L, heads, D]


class Attention(nn.Module):
    """Grouped-query attention; `kind` is this layer's entry of the attention pattern.

    The number of heads is read off the projections' outputs, so that a rank may hold a part of them.
    """

    def __init__(self, config: ModelConfig, kind: str, attend: Attend):
        super().__init__()
        width, head_dim = config.model_dim, config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.head_dim = head_dim
        self.plan_kind = "window" if kind.startswith("window") else "full"
        self.use_rope = not kind.endswith("norope")
        self.attend = attend

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], plan: Mapping[str, Tensor]) -> Tensor:
        """x [B, L, C] -> [B, L, C]; angles from `rope_angles`; plan: the tiles of each attention kind."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.use_rope:
            q, k = rotate(q, angles), rotate(k, angles)
        out = self.attend(q.contiguous(), k.contiguous(), v.contiguous(), plan[self.plan_kind])
        return self.o_proj(out.flatten(-2))
