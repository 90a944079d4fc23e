"""The figure of `benchmarks/memory.py`. matplotlib is optional: without it there are tables only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.overlap_plot import HUES, STYLE

HUE = {1: HUES[0], 2: HUES[1], 4: HUES[2]}  # of rings


def draw(found: Sequence[Any], path: Path) -> None:
    """Peaks over the length of the sequence, a panel a policy: points are measured, lines estimated."""
    import matplotlib
    from matplotlib.figure import Figure

    policies = list(dict.fromkeys(series.policy for series in found))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4 * len(policies), 3.6), layout="constrained")
        figure.suptitle("Peak memory of a rank: measured, and as estimated beforehand", fontsize=11)
        panels = figure.subplots(1, len(policies), sharex=True, sharey=True, squeeze=False)[0]
        for panel, policy in zip(panels, policies, strict=True):
            for series in (one for one in found if one.policy == policy):
                hue, what = HUE[series.ranks], "1 rank" if series.ranks == 1 else f"{series.ranks} ranks"
                panel.plot(series.lengths, [size / 1e6 for size in series.estimated], "-", color=hue, lw=1.2)
                panel.plot(series.lengths, [size / 1e6 for size in series.measured], "o", color=hue, ms=5, label=what)
            panel.set_title(f"recompute={policy}")
            panel.set_xlabel("sequence (tokens)")
            panel.set_xticks(found[0].lengths[::2], [f"{length:,}" for length in found[0].lengths[::2]])
        panels[0].set_ylabel("peak memory (MB)")
        panels[0].set_ylim(bottom=0)
        panels[0].plot([], [], "-", color="#333333", lw=1.2, label="estimate")
        panels[0].legend(loc="upper left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
