"""What each kernel can do, as a table, and the choice among them. No torch here: a plan can be judged without
it.

What a kernel cannot do is refused before the first step, with the reason and what to use instead; nothing is
dropped in silence, and `auto` never falls back to the slow kernel on its own.
"""

ORDER = ("sdpa", "reference")  # fastest first

DTYPES: dict[tuple[str, str], tuple[str, ...]] = {
    ("sdpa", "cpu"): ("float32", "bfloat16", "float64"),  # bfloat16 is computed in float32
    ("sdpa", "cuda"): ("bfloat16",),
    ("reference", "cpu"): ("float32", "bfloat16", "float64"),
    ("reference", "cuda"): ("float32", "bfloat16", "float64"),
}

WINDOWS = {("sdpa", "cpu"), ("reference", "cpu"), ("reference", "cuda")}


def refusal(kernel: str, device_type: str, dtype_name: str, window: bool, head_dim: int) -> str | None:
    """Why `kernel` cannot do this, with what to use instead; None where it can."""
    dtypes = DTYPES.get((kernel, device_type))
    if dtypes is None:
        devices = " or ".join(device for name, device in DTYPES if name == kernel)
        return f"it does not run on {device_type}: use {devices}"
    if dtype_name not in dtypes:
        alternative = f"use train.dtype={dtypes[0]} or parallel.kernel=reference"
        return f"it does not compute {dtype_name} on {device_type}: {alternative}"
    if window and (kernel, device_type) not in WINDOWS:
        alternative = "use model.attention_pattern=full or parallel.kernel=reference"
        return f"it has no windows on {device_type} yet: {alternative}"
    if (kernel, device_type) == ("sdpa", "cuda") and (head_dim % 8 or head_dim > 256):
        nearest = min(256, -(-head_dim // 8) * 8)
        return (
            f"on cuda it needs a head_dim that is a multiple of 8, 256 at most: use model.head_dim={nearest} or "
            "parallel.kernel=reference"
        )
    return None


def choose(kernel: str, device_type: str, dtype_name: str, window: bool = False, head_dim: int = 64) -> str:
    """The kernel to run; `auto` is the fast one. Raises ValueError where it cannot do the job."""
    name = ORDER[0] if kernel == "auto" else kernel
    if name not in ORDER:
        raise ValueError(f"parallel.kernel={kernel} is unknown: use auto, {' or '.join(ORDER)}")
    reason = refusal(name, device_type, dtype_name, window, head_dim)
    if reason is not None:
        chosen = f"{kernel} ({name})" if kernel == "auto" else kernel
        raise ValueError(f"parallel.kernel={chosen} is refused: {reason}")
    return name
