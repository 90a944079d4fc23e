"""A plan as numbers for machines: stable keys, units in names. No torch here."""

from collections.abc import Mapping
from typing import Any

from training.estimate import num_parameters
from training.planning import Plan
from training.ring_time import Attention
from training.searching import Search


def record(plan: Plan) -> dict[str, Any]:
    """One plan as plain values, units in the names; keys stay as they are."""
    config, degrees, needs = plan.config, plan.degrees, plan.memory
    return {
        "fits": plan.fits,
        "refusals": list(plan.refusals),
        "notes": list(plan.notes),
        "model": config.model.name,
        "parameters": num_parameters(config.model),
        "cluster": config.cluster.name,
        "nodes": plan.nodes,
        "ranks": degrees.world,
        "data": degrees.data,
        "sequence": degrees.sequence,
        "ulysses": degrees.ulysses,
        "tensor": degrees.tensor,
        "shard": degrees.shard,
        "accumulation": degrees.accumulation,
        "sequence_length_tokens": plan.setting.length,
        "padded_length_tokens": plan.setting.padded,
        "local_length_tokens": plan.setting.local_length,
        "dtype": str(config.train.dtype),
        "recompute": str(config.train.recompute),
        "offload": config.train.offload,
        "kernel": plan.kernel,
        "kernels": [row._asdict() for row in plan.kernels],
        "attention": {kind: _attention(one) for kind, one in plan.attention.items()},
        "memory": {
            "peak_bytes": plan.peak_bytes,
            "limit_bytes": plan.limit_bytes,
            "device_bytes": config.cluster.memory_bytes,
            "moment": needs.moment,
            "causes_bytes": plan.causes,
            "host_bytes_per_node": plan.host_bytes,
            "host_limit_bytes_per_node": config.cluster.host_memory_bytes,
        },
        "time": _times(plan),
        "blocks": [
            {
                "link": one.link,
                "direction": one.direction,
                "needed_tokens": one.needed_tokens,
                "tokens": one.tokens,
                "visible_share": one.visible,
                "blocks_per_hop": one.per_hop,
                "hidden": one.holds,
            }
            for one in plan.conditions
        ],
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoint_seconds": plan.checkpoint_seconds,
        "checkpoint_interval_seconds": plan.saves.interval_seconds,
        "mtbf_seconds": plan.saves.mtbf_seconds,
        "expected_goodput": plan.saves.expected,
        "extra_forward_rings": int(config.train.recompute == "full" and plan.setting.ring_size > 1),
    }


def _times(plan: Plan) -> dict[str, Any]:
    time = plan.timing
    return {
        "step_seconds": time.step_seconds,
        "exposed_seconds": time.exposed_seconds,
        "tokens": time.tokens,
        "tokens_per_second": time.tokens_per_second,
        "tokens_per_second_per_rank": time.tokens_per_second / time.ranks,
        **{f"mfu_{name}": value for name, value in plan.mfu.items()},
        "flops_causal": time.flops_causal,
        "flops_noncausal": time.flops_noncausal,
        "causes": {name: cause._asdict() for name, cause in time.causes.items()},
        "traffic": {name: traffic._asdict() for name, traffic in time.traffic.items()},
    }


def _attention(one: Attention) -> dict[str, Any]:
    choice = one.choice
    return {
        "layout": choice.layout_name,
        "route": choice.route.name,
        "depth": choice.route.depth,
        "blocks_per_hop": choice.route.blocks_per_hop,
        "node_ranks": choice.route.node_ranks,
        "why": choice.why,
        "balance": one.balance,
        "forward_seconds": one.played[0].makespan,
        "backward_seconds": one.played[1].makespan,
        "ideal_seconds": one.ideal_seconds,
    }


def rows(found: Search) -> dict[str, Any]:
    """A search as plain values, all rows."""
    return {
        "tried": found.tried,
        "fell_out": dict(found.fell_out),
        "rows": [
            {
                "arguments": row.arguments,
                "overrides": row.overrides,
                "ranks": row.degrees.world,
                "changes": _plain(row.changes),
                "layout": row.layout,
                "peak_bytes": row.peak_bytes,
                "step_seconds": row.timing.step_seconds,
                "tokens_per_second": row.timing.tokens_per_second,
                "mfu_causal": row.timing.mfu_causal if found.trusted else None,
            }
            for row in found.rows
        ],
    }


def _plain(changes: Mapping[str, object]) -> dict[str, object]:
    return {key: value if isinstance(value, bool | int | float) else str(value) for key, value in changes.items()}
