"""The figure of `benchmarks/max_context.py`. matplotlib is optional: without it there is the table only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.overlap_plot import HUES, INK, STYLE

RUNG, RING = "#9a9a9a", HUES[0]


def draw(rows: Sequence[dict[str, Any]], limit_bytes: int, path: Path) -> None:
    """Bars on a logarithmic scale, one a variant; a tick on a ring's bar is R times the one rank."""
    import matplotlib
    from matplotlib.figure import Figure

    single = [row for row in rows if row["ranks"] == 1][-1]
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(8.5, 0.6 + 0.5 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for place, row in enumerate(rows):
            ring = row["ranks"] > 1
            axes.barh(place, row["tokens"], color=RING if ring else RUNG, height=0.66, zorder=2)
            label = f" {row['tokens']:,}"
            if ring:
                ideal = row["ranks"] * single["tokens"]
                axes.plot([ideal, ideal], [place - 0.4, place + 0.4], color=HUES[3], lw=1.6, zorder=3)
                label += f"   {row['tokens'] / ideal:.3f} of {row['ranks']} ×"
            axes.text(max(row["tokens"], row["ranks"] * single["tokens"] if ring else 0), place, label, va="center")
        axes.plot([], [], color=HUES[3], lw=1.6, label="ranks × one rank, blockwise")
        axes.set(xscale="log", xlabel="longest sequence (tokens)")
        axes.set_xlim(rows[0]["tokens"] / 2, max(row["tokens"] for row in rows) * 4)
        axes.set_yticks(range(len(rows)), [row["variant"] for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.set_title(f"Longest sequence with {limit_bytes >> 20} MiB of each rank for a step's tokens", color=INK)
        axes.legend(loc="upper right")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
