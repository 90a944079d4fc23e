"""What a run would refuse before its first step, asked of the functions that refuse it. No torch here."""

from collections.abc import Callable, Mapping

from conf.schema import Degrees, Device, Dtype, Kernel, TrainConfig
from model.blocks import blocks
from model.kernels import capability
from parallel.choose import Choice
from parallel.setting import Setting


def choose_kernel(config: TrainConfig) -> tuple[str, list[capability.Row], list[str], list[str]]:
    """(the kernel the run would take, what each can do, why it is refused, notes).

    What is not installed on the machine that plans may be on those that run: on GPUs that is a note.
    """
    name, device, dtype = str(config.parallel.kernel), str(config.cluster.device), str(config.train.dtype)
    model = config.model
    rows = capability.table(device, dtype, model.head_dim)
    windowed, refused, notes = model.attention_window > 0, [], []
    if name == "flash" and device == "cuda" and not capability.flash_is_installed():
        notes.append("parallel.kernel=flash is not installed here: the run needs it")
        # What else flash cannot do: on GPUs it is what sdpa cannot do either.
        if reason := capability.refusal("sdpa", device, dtype, windowed, model.head_dim):
            refused.append(f"parallel.kernel=flash is refused: {reason}")
    else:
        try:
            name = capability.choose(name, device, dtype, windowed, model.head_dim)
        except ValueError as error:
            refused.append(str(error))
    if text := slower(config, name):
        notes.append(text)
    return name, rows, refused, notes


def slower(config: TrainConfig, kernel: str) -> str:
    """Why the cluster's rates are not those of this run, "" where they are: times are not to be trusted then."""
    wide = config.cluster.device is Device.cuda and config.train.dtype is not Dtype.bfloat16
    if not wide and kernel != Kernel.reference:
        return ""
    given = [f"train.dtype={config.train.dtype}"] * wide + ["parallel.kernel=reference"] * (kernel == Kernel.reference)
    usual = "bfloat16 and of the fast kernel" if config.cluster.device is Device.cuda else "the fast kernel"
    return (
        f"rates of cluster={config.cluster.name} are those of {usual}: with {' and '.join(given)} times are not to be "
        "trusted, and there is no MFU"
    )


def refusals(
    config: TrainConfig, degrees: Degrees, setting: Setting, choices: Mapping[str, Choice], kernel: str
) -> list[str]:
    """What the run would refuse before its first step, besides what `Setting` refuses and what does not fit."""
    found = []

    def ask(question: Callable[[], object]) -> None:
        try:
            question()
        except ValueError as error:
            if str(error) not in found:
                found.append(str(error))

    shape, device = setting.shape, str(config.cluster.device)
    ask(lambda: blocks(config.model, shape.element_bytes, int(config.cluster.block_bytes), degrees.tensor))
    rows = config.train.micro_batch_size * setting.local_length * degrees.ulysses
    ask(lambda: capability.refuse_large(rows * shape.num_heads * shape.head_dim, kernel, device))
    for choice in choices.values():
        arena = rows + choice.buffer_rows
        if choice.route.name == "gather":
            arena = rows * setting.ring_size // choice.route.head_groups
        ask(lambda arena=arena: capability.refuse_large(arena * shape.key_elements, kernel, device))
    if config.train.offload and config.cluster.device is Device.cpu:
        found.append(
            "train.offload=true needs GPUs: on cluster.device=cpu memory is the host's already, use train.offload=false"
        )
    return found
