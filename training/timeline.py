"""One layer's ring as a picture: of a few ranks, what each hop computes and which exchange is under way meanwhile.

matplotlib is optional (pip install matplotlib, or the extra `plots`), and loaded here only.
"""

from pathlib import Path

import numpy as np

from parallel.wire import COMPUTE, Played
from training.planning import Plan
from training.ring_time import Attention

MOST_RANKS = 4
MOST_HOPS = 36  # more would be a grey band: then the beginning is drawn
INK, FAINT = "#333333", "#8a8a8a"
HUES = {"forward": ("#3b6fb6", "#6b97d0"), "backward": ("#2a8c7d", "#62b3a6")}  # of hops, in turn
SENDING, WAITING = "#e2a33d", "#c1382f"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "legend.frameon": False,
}


def draw(plan: Plan, path: Path) -> None:
    """Writes a PNG of the attention that sees most, forward above backward.

    Raises:
        ValueError: without matplotlib, or where there is no ring to draw.
    """
    if plan.setting.ring_size == 1:
        raise ValueError(
            f"--plot {path} has nothing to draw: parallel.sequence={plan.degrees.sequence} with parallel.ulysses="
            f"{plan.degrees.ulysses} makes a ring of one rank, which sends nothing"
        )
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"--plot {path} needs matplotlib: pip install matplotlib, or leave --plot out") from None
    attention = next(iter(plan.attention.values()))
    ranks = shown(plan.setting.ring_size, plan.setting.network.ranks_per_node)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 2.2 + 1.3 * len(ranks)), layout="constrained")
        figure.suptitle(_title(plan, attention), fontsize=11, x=0.01, ha="left")
        panels = figure.subplots(2, 1)
        for axes, played, name in zip(panels, attention.played, HUES, strict=True):
            _pass(axes, played, ranks, name)
        _legend(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def shown(ring_size: int, node_ranks: int) -> list[int]:
    """Ranks worth drawing: the first and last of the ring, and those on both sides of the first border of a node."""
    wanted = (
        [0, node_ranks - 1, node_ranks, ring_size - 1]
        if node_ranks < ring_size
        else [0, 1, ring_size // 2, ring_size - 1]
    )
    return sorted({rank for rank in wanted if 0 <= rank < ring_size})[:MOST_RANKS]


def _title(plan: Plan, attention: Attention) -> str:
    choice, cluster = attention.choice, plan.config.cluster
    tokens = plan.setting.padded // plan.setting.ring_size
    nodes = f", {plan.setting.network.ranks_per_node} on a node" if plan.setting.network.ranks_per_node > 1 else ""
    via = " via nodes" if choice.route.node_ranks else ""
    return (
        f"One layer of {plan.config.model.name} on {cluster.name}: a ring of {plan.setting.ring_size} ranks{nodes}, "
        f"{tokens:,} tokens each, {choice.layout_name} layout, {choice.route.name} route{via}"
    )


def _pass(axes, played: Played, ranks: list[int], name: str) -> None:
    """One lane for what each rank computes, a thin one below for its exchanges; what it waits is red."""
    unit, scale = ("ms", 1e3) if played.makespan < 1 else ("s", 1.0)
    hops = len(played.hop_end)
    part = min(hops, MOST_HOPS)
    end = played.makespan if part == hops else float(played.hop_end[part - 1].max())
    rows = [row for row in played.rows() if row[0] in ranks and row[3] < end]
    for lane, rank in enumerate(ranks):
        _waits(axes, played, rank, lane, end, scale)
        for kind, color, low, height in (
            (COMPUTE, HUES[name], 0.0, 0.46),
            (1 - COMPUTE, (SENDING, "#f0c987"), 0.5, 0.2),
        ):
            mine = [row for row in rows if row[:2] == (rank, kind)]
            bars = [(scale * begin, scale * (min(stop, end) - begin)) for _, _, _, begin, stop in mine]
            hues = [color[number % 2] for _, _, number, _, _ in mine]
            axes.broken_barh(bars, (lane + low, height), facecolors=hues, edgecolor="white", linewidth=0.4)
            if kind == COMPUTE:
                _numbers(axes, mine, lane, end, scale)
    axes.set_yticks([lane + 0.35 for lane in range(len(ranks))], [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(ranks) - 0.15, -0.1)
    axes.set_xlim(0, scale * end)
    axes.set_xlabel(f"{unit}" + (f", the first {part} of {hops} hops" if part < hops else ""))
    waited = played.exposed.max() / played.makespan
    axes.set_title(f"{name}: {scale * played.makespan:,.4g} {unit}, of which a rank waits up to {100 * waited:.1f} %")


def _waits(axes, played: Played, rank: int, lane: int, end: float, scale: float) -> None:
    following = np.append(played.hop_begin[1:, rank], played.finish[rank])
    gaps = [
        (scale * begin, scale * (min(stop, end) - begin))
        for begin, stop in zip(played.hop_end[:, rank], following, strict=True)
        if begin < min(stop, end) - 1e-12
    ]
    axes.broken_barh(gaps, (lane, 0.46), facecolors=WAITING, alpha=0.85, linewidth=0)


def _numbers(axes, rows: list[tuple], lane: int, end: float, scale: float) -> None:
    """Of hops, in bars that are wide enough."""
    for _, _, number, begin, stop in rows:
        if min(stop, end) - begin > end / 60:
            middle = scale * (begin + min(stop, end)) / 2
            axes.text(middle, lane + 0.24, str(number), color="white", fontsize=7, ha="center", va="center")


def _legend(figure) -> None:
    from matplotlib.patches import Patch

    entries = [
        Patch(color=HUES["forward"][0], label="hops computed, forward"),
        Patch(color=HUES["backward"][0], label="hops computed, backward"),
        Patch(color=SENDING, label="exchange under way"),
        Patch(color=WAITING, label="waiting"),
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=4, fontsize=8)
