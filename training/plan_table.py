"""A plan as a page for people. No torch here."""

from parallel.route import Route
from training.estimate import num_parameters
from training.max_context import Longest
from training.planning import Plan, shortage
from training.refusals import slower
from training.save_clock import duration
from training.searching import Row, Search
from training.step_time import COMMUNICATION, COMPUTE

BAR = 24  # characters of a whole bar
LINKS = {"link": "inside nodes", "nic": "between nodes"}
AXES = {
    "ring": "ring",
    "ulysses": "ulysses",
    "tensor": "tensor",
    "shard": "weights and gradients",
    "replicate": "gradients of replicas",
}


def page(plan: Plan) -> str:
    """All of one plan."""
    parts = [_head(plan), _memory(plan), _time(plan), _blocks(plan), _traffic(plan), _kept(plan), _kernels(plan)]
    return "\n\n".join(part for part in parts if part)


def verdict(plan: Plan) -> str:
    """The last lines: what the run would refuse, and whether it fits."""
    lines = [f"REFUSED  {text}" for text in plan.refusals]
    if short := shortage(plan.config, plan.degrees, plan.memory):
        lines.append(f"DOES NOT FIT  {short.partition(': ')[2]}")
    lines = lines or ["FITS  and nothing is refused"]
    return "\n".join(lines + [f"note: {text}" for text in plan.notes])


def _head(plan: Plan) -> str:
    config, degrees, cluster = plan.config, plan.degrees, plan.config.cluster
    length, micro = int(config.data.sequence_length), config.train.micro_batch_size
    sequences = degrees.data * degrees.accumulation * micro
    inside = f" (ulysses {degrees.ulysses} × ring {plan.setting.ring_size})" if degrees.ulysses > 1 else ""
    choice = next(iter(plan.attention.values())).choice
    policy = f"recompute {config.train.recompute}" + ", offloaded to the host" * config.train.offload
    rows = {
        "model": f"{config.model.name}: {num_parameters(config.model):,} parameters, {config.train.dtype}; {policy}",
        "tokens": f"{sequences:,} {'sequence' if sequences == 1 else 'sequences'} of {length:,} a step"
        f"{_accumulated(degrees.accumulation)}; {plan.setting.local_length:,} a rank",
        "ranks": f"{degrees.world:,} on {_nodes(plan)} of {cluster.name} = data {degrees.data} × sequence "
        f"{degrees.sequence}{inside} × tensor {degrees.tensor}; states sharded over {degrees.shard}",
    }
    if plan.setting.ring_size > 1:
        rows["ring"] = f"{_route(choice.layout_name, choice.route)}: {choice.why.partition(', ')[2]}"
        balances = ", ".join(f"{100 * one.balance:.1f} %" for one in plan.attention.values())
        rows["balance"] = f"{balances}: work of the average rank over that of the busiest"
        for kind, one in list(plan.attention.items())[1:]:
            rows[f"ring, {kind}"] = f"{_route(one.choice.layout_name, one.choice.route)}"
    return "\n".join(f"{name:<13}{text}" for name, text in rows.items())


def _nodes(plan: Plan) -> str:
    return f"{plan.nodes:,} {'node' if plan.nodes == 1 else 'nodes'}"


def _accumulated(accumulation: int) -> str:
    return f" in {accumulation} micro-batches" if accumulation > 1 else ""


def _route(layout: str, route: Route) -> str:
    words = [f"{layout} layout, {route.name} route"]
    words += [f"{route.depth} exchanges ahead"] * (route.depth > 1)
    words += [f"{route.blocks_per_hop} blocks a hop"] * (route.blocks_per_hop > 1)
    words += ["via nodes"] * (route.node_ranks > 0)
    return ", ".join(words)


def _memory(plan: Plan) -> str:
    limit, whole = plan.limit_bytes, plan.config.cluster.memory_bytes
    rows = sorted(plan.causes.items(), key=lambda cause: -cause[1])
    lines = [f"memory of a rank at its peak: {plan.memory.moment}"]
    lines += [_line(name, _bytes(size), share=size / limit) for name, size in rows if size > 0]
    lines.append(_line("peak", _bytes(plan.peak_bytes), f"of {_bytes(limit)}", plan.peak_bytes / limit))
    if limit < whole:
        lines.append(f"  (of {_bytes(whole)}, what is left besides a tenth that an allocator cannot always reuse)")
    return "\n".join(lines)


def _time(plan: Plan) -> str:
    time = plan.timing
    step = time.step_seconds
    lines = [f"{'time of a step':<34}{'seconds':>12}{'exposed':>14}"]
    for name, label in (COMPUTE | COMMUNICATION).items():
        if name in time.causes:
            cause = time.causes[name]
            exposed = _seconds(cause.exposed_seconds) if name in COMMUNICATION else ""
            lines.append(_line(label, _seconds(cause.seconds), exposed, cause.exposed_seconds / step))
    exposed = _seconds(time.exposed_seconds)
    lines.append(_line("step", _seconds(step), exposed, 1.0))
    lines.append("")
    lines.append(
        f"  {time.tokens_per_second:,.0f} tokens/s, {time.tokens_per_second / time.ranks:,.1f} a rank{_mfu(plan)}"
    )
    if text := slower(plan.config, plan.kernel):
        lines.append(f"  {text}")
    return "\n".join(lines)


def _mfu(plan: Plan) -> str:
    causal, noncausal, ceiling = plan.mfu.values()
    if causal is None or ceiling is None:
        return ""
    also = f", {100 * noncausal:.1f} % non-causal" if noncausal is not None else ""
    return f"; MFU {100 * causal:.1f} % causal{also}; these kernels alone would reach {100 * ceiling:.1f} % causal"


def _blocks(plan: Plan) -> str:
    if not plan.whole and plan.setting.ring_size > 1:
        return "whether blocks are long enough to hide their transfer: not for packed documents, see the ring's time"
    if not plan.conditions:
        return ""
    lines = [f"{'tokens of a ring rank':<34}{'needs':>12}{'has':>14}"]
    for one in plan.conditions:
        factor = one.tokens / one.needed_tokens
        words = (
            f"hidden, {factor:.1f} × as long as needed"
            if one.holds
            else f"EXPOSED, {100 * factor:.0f} % as long as needed"
        )
        name = f"{LINKS[one.link]}, {one.direction}"
        lines.append(f"  {name:<32}{one.needed_tokens:>12,.0f}{one.tokens:>14,}  {words}")
    return "\n".join(lines)


def _traffic(plan: Plan) -> str:
    if not plan.timing.traffic:
        return ""
    lines = [f"{'sent in a step':<34}{'by a rank':>12}{'by a card':>14}"]
    for name, traffic in plan.timing.traffic.items():
        card = _bytes(traffic.nic_bytes) if traffic.nic_bytes else "-"
        lines.append(f"  {AXES[name]:<32}{_bytes(traffic.rank_bytes):>12}{card:>14}")
    if plan.config.train.recompute == "full" and plan.setting.ring_size > 1:
        forward = sum(one.rank_bytes[0] for one in plan.attention.values())
        lines.append(f"  recompute full sends each layer's forward ring once more: {_bytes(forward)} a layer and rank")
    return "\n".join(lines)


def _kept(plan: Plan) -> str:
    size, seconds = _bytes(plan.checkpoint_bytes), _seconds(plan.checkpoint_seconds)
    saves, background = plan.saves, ", in the background" if plan.config.checkpoint.background else ""
    interval, mtbf = duration(saves.interval_seconds), duration(saves.mtbf_seconds)
    lines = [
        f"checkpoint   {size}, written by {_nodes(plan)} in {seconds} s{background}",
        f"goodput      {100 * saves.expected:.2f} % of the time in steps that count: a save each {interval}, a failure "
        f"each {mtbf}",
    ]
    if plan.host_bytes:
        there = _bytes(plan.config.cluster.host_memory_bytes)
        lines.append(f"host memory  {_bytes(plan.host_bytes)} of {there} on each node")
    return "\n".join(lines)


def _kernels(plan: Plan) -> str:
    rows = []
    for row in plan.kernels:
        mark = "*" if row.kernel == plan.kernel else " "
        rows.append(f"  {mark} {row.kernel:<12}{row.dtypes:<30}{row.reason or 'can'}")
    return f"kernels on {plan.config.cluster.device}, as installed here\n" + "\n".join(rows)


def ranking(found: Search, most: int = 12) -> str:
    """The fastest configs of a search, one for each way to cut the ranks, and why others fell out."""
    best: dict[tuple, Row] = {}
    for row in found.rows:
        degrees = row.degrees
        best.setdefault((degrees.data, degrees.sequence, degrees.ulysses, degrees.tensor), row)
    head = f"  {'tokens/s':>12}{'MFU':>8}{'memory':>12}  {'layout and route':<24}overrides"
    lines = [f"{len(found.rows):,} of {found.tried:,} configs fit; the fastest of each way to cut the ranks:", head]
    for row in sorted(best.values(), key=lambda row: -row.timing.tokens_per_second)[:most]:
        mfu = f"{100 * row.timing.mfu_causal:.1f} %" if found.trusted else "-"
        lines.append(
            f"  {row.timing.tokens_per_second:>12,.0f}{mfu:>8}{_bytes(row.peak_bytes):>12}"
            f"  {row.layout:<24}{row.arguments or '(as given)'}"
        )
    if len(best) > most:
        lines.append(f"  … and {len(best) - most} more ways (--json has all)")
    if found.fell_out:
        reasons = ", ".join(f"{number} {reason}" for reason, number in found.fell_out.most_common())
        lines.append(f"  fell out: {reasons}")
    return "\n".join(lines)


def longest_line(found: Longest) -> str:
    lines = [
        f"longest sequence: {found.tokens:,} tokens ({_bytes(found.peak_bytes)} a rank); with {found.unit:,} more: "
        f"{found.reason}",
        f"  {found.arguments}",
    ]
    if found.pinned:
        lines.append("  with these layouts and routes set: where they are auto, a run may choose others that need more")
    return "\n".join(lines)


def _line(name: str, value: str, more: str = "", share: float = 0.0) -> str:
    return f"  {name:<32}{value:>12}{more:>14}  {100 * share:>5.1f} % {_bar(share)}".rstrip()


def _bar(share: float) -> str:
    eighths = round(8 * BAR * min(1.0, share))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _bytes(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if abs(size) >= unit:
            return f"{size / unit:,.{1 if size >= 10 * unit else 2}f} {name}"
    return f"{size:.0f} B"


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.1f}"
    return f"{seconds:.3f}" if seconds >= 0.0005 or not seconds else f"{seconds:.1e}"
