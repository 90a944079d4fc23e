"""What may differ between the config of a checkpoint and that of the run that goes on from it. No torch here.

Every option is free, warned, or forbidden. Free is what decides how fast or where a run computes, and what is checked
more exactly elsewhere: data, order and stages by the position in the data (`TokenStream.start`), sizes by the tensors
themselves. Warned is what makes another run of it from here on, as one may well want. Forbidden is what makes the saved
weights those of another function.
"""

import dataclasses
from typing import Any

from conf.schema import TrainConfig

RATE = "the learning rate jumps, or takes another course from here on"
STEPS = "AdamW steps in another way from here on"
HELD_OUT = "held-out losses are of other documents than those before"

FREE = (
    "model.name",
    "model.init_std",  # of first weights only
    "model.vocab_multiple",  # where it changes a tensor's size, that is refused
    "model.ffn_block_tokens",
    "model.loss_block_tokens",
    "parallel.data",
    "parallel.sequence",
    "parallel.ulysses",
    "parallel.tensor",
    "parallel.shard",
    "parallel.layout",
    "parallel.route",
    "parallel.prefetch",
    "parallel.buffer_blocks",
    "parallel.kernel",
    "parallel.tensor_shards_activations",
    "parallel.reduce_gradients",
    # By the position in the data: what is read, and in which order.
    "data.source",
    "data.name",
    "data.root",
    "data.mixture",
    "data.path",
    "data.sequence_length",
    "data.long",
    "data.short",
    "data.upweight",
    "data.positions",
    "context",
    "train.seed",
    # Of preparing a corpus, whose documents the position in the data compares:
    "data.unit",
    "data.text_field",
    "data.origin",
    "data.licence",
    "data.validation_fraction",
    "data.validation_names",
    "data.tokenizer",
    "data.vocab_size",
    "data.end_token",
    "data.workers",
    "data.shard_tokens",
    "data.balance",
    "data.cache",
    "data.cache_bytes",
    "train.micro_batch_size",  # where it changes the tokens of a step, that is warned of
    "train.recompute",
    "train.offload",
    "train.log_every",
    "train.max_skipped_steps",
    "validation.every",
    # Of machine, files and log: whole sections.
    "cluster.*",
    "checkpoint.*",
    "timeouts.*",
    "run.*",
    "logging.*",
)
WARNED = {
    "model.z_loss": "another loss is made small from here on",
    "parallel.gradient_wire": "gradients are rounded in another way",
    "data.validation_path": HELD_OUT,
    "train.steps": RATE,
    "train.global_batch_tokens": "each step is of another number of tokens",
    "train.dtype": "losses differ by what this dtype rounds",
    "optimizer.learning_rate": RATE,
    "optimizer.final_learning_rate_ratio": RATE,
    "optimizer.schedule": RATE,
    "optimizer.warmup_steps": RATE,
    "optimizer.decay_steps": RATE,
    "optimizer.beta1": STEPS,
    "optimizer.beta2": STEPS,
    "optimizer.eps": STEPS,
    "optimizer.weight_decay": STEPS,
    "optimizer.clip_norm": "gradients are clipped at another norm from here on",
    "validation.sequences": HELD_OUT,
}
FORBIDDEN = (
    "model.vocab_size",
    "model.model_dim",
    "model.num_layers",
    "model.num_heads",
    "model.num_kv_heads",
    "model.head_dim",
    "model.ffn_dim",
    "model.norm_eps",
    "model.rope_theta",
    "model.tie_embeddings",
    "model.qkv_bias",
    "model.qk_norm",
    "model.attention_pattern",
    "model.attention_window",
)
CLASSES = dict.fromkeys(FREE, "free") | dict.fromkeys(WARNED, "warned") | dict.fromkeys(FORBIDDEN, "forbidden")


def class_of(key: str) -> str | None:
    """free, warned or forbidden; None for a key that is in no class, such as one of another version."""
    return CLASSES.get(key) or CLASSES.get(key.split(".")[0] + ".*")


def check(
    saved: dict[str, Any],
    config: TrainConfig,
    saved_layout: dict[str, int] | None = None,
    layout: dict[str, int] | None = None,
) -> list[str]:
    """Compares a checkpoint's config, as its manifest has it, with that of the run; returns warnings.

    With the layouts of both ("data": its size), tokens of a step are compared where they follow from the layout, too.

    Raises:
        ValueError: where forbidden options differ, or the checkpoint has set one of the model that this version does
            not know; naming each, both values, and what to use.
    """
    now, then = flat(dataclasses.asdict(config)), flat(saved)
    by_layout = saved_layout is not None and layout is not None
    warnings, refused = _differences(now, then, skip=("train.global_batch_tokens",) if by_layout else ())
    if refused:
        overrides = " ".join(override for override in refused.values() if override)
        version = "" if all(refused.values()) else "the version that wrote it"
        # Another name alone does not help where a path says what to begin at.
        anew = "" if config.run.resume in ("auto", "never") else " run.resume=auto"
        raise ValueError(
            f"the checkpoint is of another model ({'; '.join(refused)}): use {overrides or version}"
            f"{f' and {version}' if overrides and version else ''}, or start another run with run.name=NAME{anew}"
        )
    if by_layout:
        warnings += _batch_warning(then, saved_layout, now, layout)
    return warnings


def _differences(
    now: dict[str, Any], then: dict[str, Any], skip: tuple[str, ...]
) -> tuple[list[str], dict[str, str | None]]:
    """Warnings; and what is refused, with the override that helps: None where this version has none."""
    defaults = flat(dataclasses.asdict(TrainConfig()))
    warnings, refused = list[str](), dict[str, str | None]()
    for key in sorted(now.keys() | then.keys()):
        kind = class_of(key)
        if kind == "free" or (key in now and key in then and now[key] == then[key]):
            continue
        if key not in then:
            text = f"{key}={shown(now[key])}, which the checkpoint's version did not know"
            if now[key] != defaults[key] and kind == "forbidden":
                refused[text] = _override(key, defaults[key])
            elif now[key] != defaults[key]:
                warnings.append(text)
        elif key not in now:
            text = f"{shown(key)}={shown(then[key])} in the checkpoint, which this version does not know"
            if then[key] and key.split(".")[0] == "model":
                refused[text] = None
            elif then[key]:  # null, 0 and false are what an option does nothing with
                warnings.append(text)
        elif kind == "warned" and key not in skip:
            warnings.append(f"{key}={shown(now[key])}, was {shown(then[key])} in the checkpoint: {WARNED[key]}")
        elif kind == "forbidden":
            refused[f"{key}={shown(now[key])}, but {shown(then[key])} in the checkpoint"] = _override(key, then[key])
    return warnings, refused


def _batch_warning(
    then: dict[str, Any], saved_layout: dict[str, int], now: dict[str, Any], layout: dict[str, int]
) -> list[str]:
    """Where train.global_batch_tokens is null, a step is as large as the ranks make it. Zero or one warning."""
    key = "train.global_batch_tokens"
    before, after = then.get(key), now[key]
    sequences = [
        values.get("train.micro_batch_size", 1) * sizes.get("data", 1)
        for values, sizes in ((then, saved_layout), (now, layout))
    ]
    if before is None and after is None:
        if sequences[0] == sequences[1]:
            return []
        # Asked for in tokens, which stages of several lengths cannot be.
        use = "" if now["context"] else f": use {key}={sequences[0] * now['data.sequence_length']} for steps as before"
        return [f"a step is of {sequences[1]} sequences, was of {sequences[0]} in the checkpoint{use}"]
    if not now["context"]:
        before = before or sequences[0] * then.get("data.sequence_length", 0)
        after = after or sequences[1] * now["data.sequence_length"]
    if before == after:
        return []
    return [f"{key}={shown(after)}, was {shown(before)} in the checkpoint: {WARNED[key]}"]


def flat(sections: dict[str, Any]) -> dict[str, Any]:
    """Options by their dotted keys; `context`, which is a list, as one."""
    found = {}
    for section, options in sections.items():
        if isinstance(options, dict):
            found |= {f"{section}.{name}": value for name, value in options.items()}
        else:
            found[section] = options
    return found


def _override(key: str, value: Any) -> str:
    """As it is typed in a shell; a comma would be a sweep."""
    text = shown(value)
    return f"'{key}=\"{text}\"'" if "," in text else f"{key}={text}"


def shown(value: Any) -> str:
    """As it is typed in an override; a string of a file cannot draw on the terminal, or fill it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 100 else text[:97] + "..."
