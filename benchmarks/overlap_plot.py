"""The figure of `benchmarks/overlap.py`. matplotlib is optional: without it there are tables only."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.overlap_model import OVER_BOUND, Cell, Knee, slope

HUES = ("#3b4cc0", "#2a9d8f", "#e9a03b", "#c1382f")  # of links, slow to fast
MARKS = {"1": "o", "1/4": "^"}  # of ratios of key/value to query heads
RATIO_HUES = ("#333333", "#8e44ad")
INK, FAINT = "#333333", "#9a9a9a"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def draw(cells: Sequence[Cell], knees: Sequence[Knee], path: Path) -> None:
    """Above: forward steps over block sizes, a panel a link. Below: all steps against prediction, and the knees."""
    import matplotlib
    from matplotlib.figure import Figure

    links = sorted({cell.gigabits for cell in cells})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 8), layout="constrained")
        above, below = figure.subfigures(2, 1, height_ratios=(1, 1.1))
        above.suptitle("Ring attention on two ranks joined by a shaped link: computing against sending", fontsize=12)
        panels = above.subplots(1, len(links), sharex=True, sharey=True)
        for panel, link in zip(panels, links, strict=True):
            _link(panel, [cell for cell in cells if cell.gigabits == link])
        panels[0].set_ylabel("forward step (ms)")
        panels[-1].legend(loc="upper left", fontsize=7)
        scatter, excess, knee = below.subplots(1, 3)
        _steps(scatter, cells, links)
        _excess(excess, cells, links)
        _knees(knee, knees, links)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _link(axes, cells: Sequence[Cell]) -> None:
    """Forward steps of one link over the block size."""
    blocks = sorted({cell.case.block for cell in cells})
    for (ratio, mark), hue in zip(MARKS.items(), RATIO_HUES, strict=True):
        swept = sorted((cell for cell in cells if cell.case.ratio_text == ratio), key=lambda cell: cell.case.block)
        steps = [cell.steps()[0] for cell in swept]
        if ratio == "1":
            axes.plot(blocks, [1e3 * s.compute for s in steps], "--", color=FAINT, lw=1.2, label="compute alone")
        axes.plot(blocks, [1e3 * s.transfer for s in steps], ":", color=hue, lw=1.2, label=f"transfer, heads {ratio}")
        axes.plot(blocks, [1e3 * s.predicted for s in steps], "-", color=hue, lw=1.4, label=f"predicted, heads {ratio}")
        axes.plot(blocks, [1e3 * s.seconds for s in steps], mark, color=hue, ms=5, label=f"measured, heads {ratio}")
    axes.set_title(f"{cells[0].gigabits:g} Gb/s")
    axes.set(xscale="log", yscale="log", xlabel="block size (tokens per rank)")
    axes.set_xticks(blocks, [f"{block:,}" for block in blocks])
    axes.minorticks_off()
    _plain(axes.yaxis)


def _steps(axes, cells: Sequence[Cell], links: Sequence[float]) -> None:
    """All steps, measured over predicted."""
    for cell in cells:
        for step in cell.steps():
            hue = HUES[links.index(cell.gigabits)]
            face = hue if step.passes == "forward" else "white"
            axes.plot(1e3 * step.predicted, 1e3 * step.seconds, MARKS[cell.case.ratio_text], mec=hue, mfc=face, ms=5)
    low, high = (edge(1e3 * step.predicted for cell in cells for step in cell.steps()) for edge in (min, max))
    ends = [low / 1.3, high * 1.3]
    axes.plot(ends, ends, color=INK, lw=0.9, zorder=1)
    axes.fill_between(ends, ends, [OVER_BOUND * end for end in ends], color="#000000", alpha=0.10, lw=0, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="predicted step (ms)", ylabel="measured step (ms)")
    axes.set_title("Steps: measured over predicted")
    _plain(axes.xaxis, axes.yaxis)
    _legend(axes, links)


def _excess(axes, cells: Sequence[Cell], links: Sequence[float]) -> None:
    """The criterion: what the overlapped part took over what it should take, from hidden to exposed transfers."""
    steps = [(cell, step) for cell in cells for step in cell.steps()]
    for cell, step in steps:
        hue = HUES[links.index(cell.gigabits)]
        face = hue if step.passes == "forward" else "white"
        axes.plot(step.transfer / step.compute, step.over, MARKS[cell.case.ratio_text], mec=hue, mfc=face, ms=5)
    held = sum(step.over <= OVER_BOUND for _, step in steps)
    axes.axhline(1, color=INK, lw=0.9, zorder=1)
    axes.axhline(OVER_BOUND, color=HUES[3], lw=1.1, ls="--", zorder=1)
    axes.text(
        0.99,
        OVER_BOUND,
        f"bound {OVER_BOUND}",
        color=HUES[3],
        ha="right",
        va="bottom",
        fontsize=8,
        transform=axes.get_yaxis_transform(),
    )
    axes.set(xscale="log", xlabel="transfer / compute", ylabel="(step − unhideable) / max(compute, transfer)")
    over = [step.over for _, step in steps]
    axes.set_ylim(min(0.9, min(over) - 0.02), max(1.3, max(over) + 0.02))
    _plain(axes.xaxis)
    axes.set_title(f"{held} of {len(steps)} steps within the bound")


def _knees(axes, knees: Sequence[Knee], links: Sequence[float]) -> None:
    """Knees, measured over the formula's."""
    axes.set(xscale="log", yscale="log", xlabel="knee by the formula (tokens)", ylabel="knee measured (tokens)")
    if not knees:
        return
    for knee in knees:
        hue = HUES[links.index(knee.gigabits)]
        face = hue if knee.passes == "forward" else "white"
        axes.plot(knee.formula, knee.measured, MARKS[knee.ratio], mec=hue, mfc=face, ms=6)
    ends = [edge(x for knee in knees for x in (knee.formula, knee.measured)) for edge in (min, max)]
    ends = [ends[0] / 1.2, ends[1] * 1.2]
    axes.plot(ends, ends, color=INK, lw=0.9, zorder=1)
    found = slope(knees)
    axes.set_title("Knees" if found is None else f"Knees: slope {found:.2f}")
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_ticks([2**n for n in range(7, 16) if limits[0] <= 2**n <= limits[1]])
        _plain(axis)
    axes.minorticks_off()


def _plain(*axes) -> None:
    """Numbers as they are, not as powers."""
    for axis in axes:
        axis.set_major_formatter(lambda x, _: f"{x:,g}")


def _legend(axes, links: Sequence[float]) -> None:
    from matplotlib.lines import Line2D

    def entry(label: str, mark: str, edge: str, face: str) -> Line2D:
        return Line2D([], [], ls="", marker=mark, mec=edge, mfc=face, label=label)

    entries = [entry(f"{link:g} Gb/s", "s", hue, hue) for hue, link in zip(HUES, links, strict=False)]
    entries += [entry(f"key/value heads {ratio}", mark, INK, INK) for ratio, mark in MARKS.items()]
    entries += [entry("forward", "o", INK, INK), entry("forward+backward", "o", INK, "white")]
    axes.legend(handles=entries, loc="upper left")
