"""Tiles of attention on flash-attn, on CUDA: version 3 on Hopper where it is installed, else version 2.

The only file that knows these packages, and it imports neither before it is asked to compute: it can be
imported without them and without a GPU. `varlen` turns tiles into launches; here they are handed over.
Versions: flash-attn >= 2.7, and 3 with `window_size_left` in its interface (both return lse as [H, n]).

Source: arXiv:2307.08691 (version 2), arXiv:2407.08608 (version 3).
"""

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from model.kernels import launches, varlen
from model.kernels.tiles import empty_gradients, empty_state
from model.kernels.varlen import Launch


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of q [N, H, D] over the keys k, v [M, G, D] that `tiles` (int64[n, 8]) show, G dividing H; bfloat16.

    Returns (out [N, H, D], lse [H, N]) in float32: 0 and -inf where a row meets no key. With `into`, merges
    into that state in place instead, and returns it. Raises RuntimeError where flash-attn is missing.
    """
    state = empty_state(q) if into is None else into
    return launches.forward(_calls(q.device)[0], varlen.group(tiles, q.device), q, k, v, state)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tensor,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward` through these tiles, given the *global* out and lse: those over all keys a row
    ever sees.

    dout, q, out [N, H, D], k, v [M, G, D], lse [H, N]. Returns (dq, dk, dv) in float32, zero where no tile
    comes. With `into`, adds to those in place instead, and returns them.
    """
    gradients = empty_gradients(q, k) if into is None else into
    given = dout, q, k, v, out.to(q.dtype), lse
    return launches.backward(_calls(q.device)[1], varlen.group(tiles, q.device), *given, gradients)


@lru_cache
def _calls(device: torch.device) -> tuple[Callable, Callable]:
    """The kernel for this device, as `varlen` calls it."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if hopper and find_spec("flash_attn_interface"):
        import flash_attn_interface

        return _version_3(flash_attn_interface)
    try:
        from flash_attn import flash_attn_interface
    except ImportError as error:
        raise RuntimeError(
            f"parallel.kernel=flash needs flash-attn, which cannot be imported ({error}): pip install flash-attn "
            "--no-build-isolation, or use parallel.kernel=sdpa"
        ) from error
    return _version_2(flash_attn_interface)


def _version_2(package) -> tuple[Callable, Callable]:
    def forward(q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
        out, lse, *_ = package._flash_attn_varlen_forward(
            q, k, v, **_sequences(launch), **_mask(launch), dropout_p=0.0, softmax_scale=q.shape[-1] ** -0.5
        )
        return out, lse

    def backward(
        dout: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, launch: Launch
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        package._flash_attn_varlen_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            dq,
            dk,
            dv,
            **_sequences(launch),
            **_mask(launch),
            dropout_p=0.0,
            softmax_scale=q.shape[-1] ** -0.5,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
        )
        return dq, dk, dv

    return forward, backward


def _version_3(package) -> tuple[Callable, Callable]:
    def forward(q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
        out, lse, *_ = package._flash_attn_forward(
            q, k, v, **_sequences(launch), **_mask(launch), softmax_scale=q.shape[-1] ** -0.5
        )
        return out, lse

    def backward(
        dout: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, launch: Launch
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        mask = _mask(launch)
        package._flash_attn_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            **_sequences(launch),
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=q.shape[-1] ** -0.5,
            is_causal=mask.pop("causal"),
            **mask,
        )
        return dq, dk, dv

    return forward, backward


def _sequences(launch: Launch) -> dict:
    return {
        "cu_seqlens_q": launch.row_starts,
        "cu_seqlens_k": launch.key_starts,
        "max_seqlen_q": launch.max_rows,
        "max_seqlen_k": launch.max_keys,
    }


def _mask(launch: Launch) -> dict:
    right = 0 if launch.causal else -1
    return {"causal": launch.causal, "window_size_left": launch.left, "window_size_right": right}
