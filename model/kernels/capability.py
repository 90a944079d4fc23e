"""What each kernel can do, as a table, and the choice among them. No torch here: a plan can be judged without
it.

What a kernel cannot do is refused before the first step, with the reason and what to use instead; nothing is
dropped in silence, and `auto` never falls back to the slow kernel on its own. Layouts and routes restrict no
kernel: all a kernel ever sees is tiles.
"""

from importlib.util import find_spec
from typing import NamedTuple

KERNELS = ("flash", "sdpa", "reference")  # fastest first; `auto` stops before the last

DTYPES: dict[tuple[str, str], tuple[str, ...]] = {
    ("flash", "cuda"): ("bfloat16",),
    ("sdpa", "cpu"): ("float32", "bfloat16", "float64"),  # bfloat16 is computed in float32
    ("sdpa", "cuda"): ("bfloat16",),
    ("reference", "cpu"): ("float32", "bfloat16", "float64"),
    ("reference", "cuda"): ("float32", "bfloat16", "float64"),
}

# Attention dropout is in none of them, and no option asks for it: nobody pretrains with it.
MASKS = {kernel: ("causal", "documents", "window") for kernel in KERNELS}

# Elements of a tensor that a kernel indexes in 32 bits. PyTorch's CPU kernel counts in 64, and so do the
# operations of which the reference is made.
INDEXED = (1 << 31) - 1
MOST_ELEMENTS = {("flash", "cuda"): INDEXED, ("sdpa", "cuda"): INDEXED}

MODULES = ("flash_attn_2_cuda", "flash_attn_interface")  # of flash-attn 2 (its compiled part) and of 3


class Row(NamedTuple):
    """One kernel on one device, for one dtype and head_dim; `reason` is "" where it can run there."""

    kernel: str
    layouts: str
    routes: str
    causal: bool
    documents: bool
    window: bool
    dropout: bool
    dtypes: str
    reason: str


def table(device_type: str, dtype_name: str, head_dim: int) -> list[Row]:
    """What every kernel can do on this kind of device, and why it cannot where it cannot; fastest first."""
    rows = []
    for kernel in KERNELS:
        reason = refusal(kernel, device_type, dtype_name, False, head_dim)
        masks = [mask in MASKS[kernel] for mask in ("causal", "documents", "window", "dropout")]
        dtypes = ", ".join(DTYPES.get((kernel, device_type), ())) or "none"
        rows.append(Row(kernel, "all", "all", *masks, dtypes, reason or ""))
    return rows


def flash_is_installed() -> bool:
    """Whether flash-attn can be found; it is not imported."""
    return any(find_spec(module) is not None for module in MODULES)


def refusal(kernel: str, device_type: str, dtype_name: str, window: bool, head_dim: int) -> str | None:
    """Why `kernel` cannot do this, with what to use instead; None where it can."""
    dtypes = DTYPES.get((kernel, device_type))
    if dtypes is None:
        devices = " or ".join(device for name, device in DTYPES if name == kernel)
        return f"it does not run on {device_type}: use {devices}, or parallel.kernel=auto"
    if kernel == "flash" and not flash_is_installed():
        return "flash-attn is not installed: pip install flash-attn --no-build-isolation, or use parallel.kernel=sdpa"
    if dtype_name not in dtypes:
        alternative = f"use train.dtype={dtypes[0]} or parallel.kernel=reference"
        return f"it does not compute {dtype_name} on {device_type}: {alternative}"
    if window and "window" not in MASKS[kernel]:
        return "it has no windows: use model.attention_pattern=full or parallel.kernel=reference"
    if device_type == "cuda" and kernel != "reference" and (head_dim % 8 or head_dim > 256):
        nearest = min(256, -(-head_dim // 8) * 8)
        return (
            f"on cuda it needs a head_dim that is a multiple of 8, 256 at most: use model.head_dim={nearest} or "
            "parallel.kernel=reference"
        )
    return None


def choose(kernel: str, device_type: str, dtype_name: str, window: bool = False, head_dim: int = 64) -> str:
    """The kernel to run. `auto` is the fastest that is there: flash on CUDA where flash-attn is installed, else sdpa.

    Raises ValueError where it cannot do the job.
    """
    auto = "flash" if device_type == "cuda" and flash_is_installed() else "sdpa"
    name = auto if kernel == "auto" else kernel
    if name not in KERNELS:
        raise ValueError(f"parallel.kernel={kernel} is unknown: use auto, {', '.join(KERNELS[:-1])} or {KERNELS[-1]}")
    reason = refusal(name, device_type, dtype_name, window, head_dim)
    if reason is not None:
        chosen = f"{kernel} ({name})" if kernel == "auto" else kernel
        raise ValueError(f"parallel.kernel={chosen} is refused: {reason}")
    return name


def refuse_large(elements: int, kernel: str, device_type: str) -> None:
    """Raises ValueError for a tensor that `kernel` cannot index: its offsets would wrap round in silence."""
    most = MOST_ELEMENTS.get((kernel, device_type))
    if most is not None and elements > most:
        raise ValueError(
            f"a tensor of {elements} elements is too large for parallel.kernel={kernel} on {device_type}, which counts "
            f"them in 32 bits: at most {most}; use more ranks (parallel.sequence) or a smaller train.micro_batch_size"
        )
