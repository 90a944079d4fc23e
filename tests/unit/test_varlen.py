"""Tiles turned into launches of a varlen kernel: the arithmetic whole, the kernel itself played in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model.kernels import flash, launches, reference, sdpa, varlen
from model.kernels.tiles import empty_state
from model.mask import trim

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget():
    """Launches are remembered by the table alone; tests change the limits."""
    varlen._remembered.clear()
    yield
    varlen._remembered.clear()


@pytest.fixture(params=["no limits", "tight limits"])
def limits(request, monkeypatch):
    """Tight: launches of few keys, few sequences, and of sequences of about equal length."""
    if request.param == "tight limits":
        monkeypatch.setattr(varlen, "KEY_ROWS", 16)
        monkeypatch.setattr(varlen, "MAX_SEQUENCES", 2)
        monkeypatch.setattr(varlen, "SKEW", 1)
        monkeypatch.setattr(varlen, "BLOCK", 2)
    return request.param


def random_table(rng, rows, keys, tiles):
    """Trimmed tiles of every kind of band, anywhere: they share query rows, and key rows, as they like."""
    table = []
    while len(table) < tiles:
        q_start, q_stop = sorted(rng.choice(rows + 1, 2, replace=False).tolist())
        k_start, k_stop = sorted(rng.choice(keys + 1, 2, replace=False).tolist())
        lower = int(rng.choice([-100, *rng.integers(-keys, keys, 2)]))
        upper = int(rng.choice([100, lower + rng.integers(0, keys)]))
        cut = [int(x) for x in trim(q_stop - q_start, k_stop - k_start, lower, upper)]
        if cut[1] > cut[0]:
            corner = q_start + cut[0], q_start + cut[1], k_start + cut[2], k_start + cut[3]
            table.append((0, *corner, cut[4], cut[5], 0))
    return torch.tensor(table, dtype=torch.int64).reshape(-1, 8)


def hidden(rows, keys, causal, left, right):
    """bool[rows, keys]: what flash-attn >= 2.1 hides, from its documentation: bottom right alignment."""
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)[None]
    right = 0 if causal else right
    return ((j > i + right) if right >= 0 else (j < 0)) | ((j < i - left) if left >= 0 else (j < 0))


def numbers(where):
    return torch.arange(where.start, where.stop) if isinstance(where, slice) else where


def parts(launch):
    """(query rows, key rows, hidden) of each sequence of a launch, as row numbers."""
    rows, keys = numbers(launch.rows), numbers(launch.keys)
    row_starts, key_starts = launch.row_starts.tolist(), launch.key_starts.tolist()
    assert row_starts[-1] == len(rows) and key_starts[-1] == len(keys)
    for n in range(len(row_starts) - 1):
        mine, seen = rows[row_starts[n] : row_starts[n + 1]], keys[key_starts[n] : key_starts[n + 1]]
        assert 0 < len(mine) <= launch.max_rows and 0 < len(seen) <= launch.max_keys
        yield mine, seen, hidden(len(mine), len(seen), launch.causal, launch.left, 0 if launch.causal else -1)


def scores(q, k):
    """[H, n, m] of q [n, H, D] and k [m, G, D]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.einsum("ihd,jhd->hij", q, k) / q.shape[2] ** 0.5


def played(cu_q, cu_k, max_q, max_k, causal, left, right):
    """The sequences of a call, checked as a kernel would: (query slice, key slice, hidden)."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and len(cu_q) == len(cu_k) and max_q >= 2
    starts = zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), cu_k[:-1].tolist(), cu_k[1:].tolist(), strict=True)
    for q_start, q_stop, k_start, k_stop in starts:
        assert q_stop - q_start <= max_q and k_stop - k_start <= max_k
        mask = hidden(q_stop - q_start, k_stop - k_start, causal, left, right)
        yield slice(q_start, q_stop), slice(k_start, k_stop), mask


def play_forward(q, k, v, *how):
    """What a varlen kernel returns: out [n, H, D], lse [H, n]."""
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=q.dtype)
    for rows, keys, mask in played(*how):
        s = scores(q[rows], k[keys]).masked_fill(mask, -torch.inf)
        lse[:, rows] = s.logsumexp(-1)
        value = v[keys].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[rows] = torch.einsum("hij,jhd->ihd", s.softmax(-1), value)
    return out, lse


def play_backward(dout, q, k, v, out, lse, *how):
    """Gradients as the kernel writes them: each place of dk and dv once, by the global out and lse."""
    share, dq, dk, dv = q.shape[1] // k.shape[1], *(torch.full_like(x, torch.nan) for x in (q, k, v))
    for rows, keys, mask in played(*how):
        p = torch.exp(scores(q[rows], k[keys]).masked_fill(mask, -torch.inf) - lse[:, rows, None])
        key, value = (x[keys].repeat_interleave(share, dim=1) for x in (k, v))
        dp = torch.einsum("ihd,jhd->hij", dout[rows], value) - (dout[rows] * out[rows]).sum(-1).T[..., None]
        ds = p * dp / q.shape[2] ** 0.5
        dq[rows] = torch.einsum("hij,jhd->ihd", ds, key)
        dk[keys] = torch.einsum("hij,ihd->jhd", ds, q[rows]).unflatten(1, (-1, share)).sum(2)
        dv[keys] = torch.einsum("hij,ihd->jhd", p, dout[rows]).unflatten(1, (-1, share)).sum(2)
    return dq, dk, dv


def flash_2():
    """The functions of flash_attn.flash_attn_interface that we use, with the parameters of version 2.8."""

    def forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        assert dropout_p == softcap == 0.0 and softmax_scale == q.shape[-1] ** -0.5
        how = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size_left, window_size_right
        return *play_forward(q, k, v, *how), None, None

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert dropout_p == softcap == 0.0 and softmax_scale == q.shape[-1] ** -0.5 and alibi_slopes is None
        how = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size_left, window_size_right
        for mine, played_one in zip((dq, dk, dv), play_backward(dout, q, k, v, out, softmax_lse, *how), strict=True):
            mine.copy_(played_one)

    package = SimpleNamespace(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward)
    return flash._version_2(package)


def flash_3():
    """The functions of flash_attn_interface (version 3) that we use; parameters that we leave alone are left out."""

    def forward(
        q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
        causal=False, window_size_left=-1, window_size_right=-1,
    ):  # fmt: skip
        assert softmax_scale == q.shape[-1] ** -0.5
        how = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size_left, window_size_right
        return *play_forward(q, k, v, *how), None, None

    def backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1,
    ):  # fmt: skip
        assert softmax_scale == q.shape[-1] ** -0.5
        how = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window_size_left, window_size_right
        for mine, played_one in zip((dq, dk, dv), play_backward(dout, q, k, v, out, softmax_lse, *how), strict=True):
            mine.copy_(played_one)

    return flash._version_3(SimpleNamespace(_flash_attn_forward=forward, _flash_attn_backward=backward))


def aten(monkeypatch):
    """The functions of torch.ops.aten that sdpa uses on CUDA, by their schema."""

    def forward(
        q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
        window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert dropout_p == 0.0 and not return_debug_mask
        how = cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right
        return *play_forward(q, k, v, *how), None, None, None

    def backward(
        dout, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
        scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert dropout_p == 0.0
        how = cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right
        return play_backward(dout, q, k, v, out, lse, *how)

    monkeypatch.setattr(sdpa, "_varlen_cuda", forward)
    monkeypatch.setattr(sdpa, "_varlen_cuda_backward", backward)
    return sdpa._cuda_forward, sdpa._cuda_backward


@pytest.mark.parametrize("seed", range(20))
def test_launches_show_each_pair_of_the_tiles_once(seed, limits):
    """... and no launch has a query row twice, or is beyond the limits."""
    rng = np.random.default_rng(seed)
    rows, keys = rng.integers(2, 40, 2).tolist()
    tiles = random_table(rng, rows, keys, int(rng.integers(1, 12)))
    counted, want = torch.zeros(rows, keys, dtype=torch.int64), torch.zeros(rows, keys, dtype=torch.int64)
    for _, q_start, q_stop, k_start, k_stop, lower, upper, _ in tiles.tolist():
        i, j = torch.arange(q_stop - q_start)[:, None], torch.arange(k_stop - k_start)[None]
        want[q_start:q_stop, k_start:k_stop] += (j >= i + lower) & (j <= i + upper)
    for launch in varlen.group(tiles, CPU):
        taken = numbers(launch.rows)
        assert len(taken.unique()) == len(taken)
        if limits == "tight limits":
            assert len(launch.row_starts) <= 3 and launch.key_starts[-1] - launch.key_starts[1] <= 16
        for mine, seen, mask in parts(launch):
            counted.index_put_((mine[:, None], seen[None, :]), (~mask).long(), accumulate=True)
            assert not mask.all(-1).any() and (launch.causal or not mask.any())
    assert torch.equal(counted, want)


@pytest.mark.parametrize("kernel", ["flash 2", "flash 3", "sdpa"])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (3, 1)])
def test_forward_and_backward_equal_the_reference(kernel, heads, groups, limits, monkeypatch):
    """Over several hops of random tiles, merged and summed into strided views, in float64."""
    calls = {"flash 2": flash_2, "flash 3": flash_3, "sdpa": lambda: aten(monkeypatch)}[kernel]()
    rng = np.random.default_rng(heads)
    for case in range(6):
        generator = torch.Generator().manual_seed(case)
        rows, keys = rng.integers(2, 30, 2).tolist()
        hops = [random_table(rng, rows, keys, count) for count in (1, 6, 0, 3)]
        q, dout = (torch.randn(rows, heads + 1, 4, generator=generator, dtype=torch.float64)[:, 1:] for _ in range(2))
        k, v = torch.randn(keys, 2, groups, 4, generator=generator, dtype=torch.float64).unbind(1)
        state, want = empty_state(q), None
        for tiles in hops:
            launches.forward(calls[0], varlen.group(tiles, CPU), q, k, v, state)
            want = reference.forward(q, k, v, tiles, want)
        arena = torch.zeros(keys, 2, groups, 4, dtype=torch.float64)
        grads = (torch.zeros(rows, heads + 1, 4, dtype=torch.float64)[:, 1:], *arena.unbind(1))
        truth = tuple(torch.zeros_like(x) for x in (q, k, v))
        for tiles in hops:
            launches.backward(calls[1], varlen.group(tiles, CPU), dout, q, k, v, *state, grads)
            reference.backward(dout, q, k, v, *want, tiles, into=truth)
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), (*state, *grads), (*want, *truth), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def tile(q, k, lower=None, upper=None):
    rows, keys = q[1] - q[0], k[1] - k[0]
    return 0, *q, *k, 1 - rows if lower is None else lower, keys - 1 if upper is None else upper, 0


@pytest.mark.parametrize(
    ("tiles", "count"),
    [
        # zigzag, one document: a rank with itself, with an earlier and with a later rank
        ([tile((0, 8), (0, 8), upper=0), tile((8, 16), (0, 8)), tile((8, 16), (8, 16), upper=0)], 2),
        ([tile((0, 16), (0, 8))], 1),
        ([tile((8, 16), (0, 16))], 1),
        # packed documents side by side, and a band whose last rows see everything
        ([tile((0, 5), (0, 5), upper=0), tile((5, 9), (5, 9), upper=0), tile((9, 10), (9, 10))], 2),
        ([tile((0, 8), (0, 6), upper=2)], 2),
        # striped: the strict triangle
        ([tile((1, 8), (0, 7), upper=0)], 1),
    ],
)
def test_the_common_hops_are_few_launches_that_copy_nothing(tiles, count):
    made = varlen.group(torch.tensor(tiles), CPU)
    assert len(made) == count
    assert all(isinstance(launch.rows, slice) and isinstance(launch.keys, slice) for launch in made)


def test_full_tiles_that_share_rows_are_one_sequence():
    """Four blocks that two query chunks see: merged once, not four times."""
    tiles = [tile(q, (k, k + 4)) for q in ((0, 8), (8, 16)) for k in (0, 8, 16, 24)]
    (launch,) = varlen.group(torch.tensor(tiles), CPU)
    assert launch.row_starts.tolist() == [0, 8, 16] and launch.key_starts.tolist() == [0, 16, 32]


def test_a_window_needs_one_more_launch():
    """All tiles of a window have the same width, so its two edges and its middle are two launches at most."""
    tiles = [tile((0, 40), (0, 52), 0, 12), tile((40, 70), (60, 90), -12, 0), tile((70, 82), (90, 102), 0)]
    made = varlen.group(torch.tensor(tiles), CPU)
    assert [(launch.causal, launch.left) for launch in made] == [(True, -1), (True, 12)]


def test_few_long_and_many_short_sequences_are_launched_apart():
    """A launch costs its longest sequence for each of them."""
    tiles = [tile((n, n + 1), (n, n + 1)) for n in range(300)] + [tile((300, 300 + 10**6), (300, 300 + 10**6))]
    made = varlen.group(torch.tensor(tiles), CPU)
    assert sorted(launch.max_rows for launch in made) == [2, 10**6]


def test_launches_are_made_once_for_equal_tables():
    table = torch.tensor([tile((0, 8), (0, 8), upper=0)])
    assert varlen.group(table, CPU) is varlen.group(table.clone(), CPU)


def test_turns_keep_overlapping_ranges_apart_in_as_few_as_possible():
    rng = np.random.default_rng(0)
    for _ in range(200):
        start = np.sort(rng.integers(0, 40, 12))
        stop = start + rng.integers(1, 12, 12)
        turn = launches.turns(start, stop)
        for number in range(turn.max() + 1):
            mine = turn == number
            assert (start[mine][1:] >= stop[mine][:-1]).all()
        deepest = max(((start <= at) & (at < stop)).sum() for at in range(60))
        assert turn.max() + 1 == deepest


def test_aten_takes_our_arguments():
    """By its own shape functions, without a GPU: out as q, lse [H, n], gradients as q, k, v."""
    q, k = (torch.empty(12, heads, 8, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    (launch,) = varlen.group(torch.tensor([tile((0, 12), (0, 12), -3, 0)]), CPU)
    launch = launch._replace(row_starts=launch.row_starts.to("meta"), key_starts=launch.key_starts.to("meta"))
    assert launch.left == 3
    out, lse = sdpa._cuda_forward(q, k, k, launch)
    assert out.shape == q.shape and lse.shape == (4, 12) and lse.dtype == torch.float32
    grads = sdpa._cuda_backward(out, q, out, k, k, lse, launch)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


def test_flash_is_refused_with_the_alternative_where_it_is_missing():
    q = torch.zeros(2, 1, 8)
    with pytest.raises(RuntimeError, match="parallel.kernel=flash needs flash-attn.*use parallel.kernel=sdpa"):
        flash.forward(q, q, q, torch.zeros(0, 8, dtype=torch.int64))
