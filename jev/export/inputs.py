"""What an export takes by way of torch and transformers: the head's numbers and the chat template's text.

Both packages come with the extra ``export`` and are imported only when needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jev.checkpoint.checked_json import CheckpointError


def read_head(path: Path, width: int) -> tuple[list[float], float]:
    """(weight of ``width`` numbers, bias) from ``head.pt``, which is unpickled without running any code of its own.

    Raises CheckpointError for anything but {"weight": finite [1, width], "bias": finite [1]}.
    """
    torch = import_extra("torch")
    try:
        head = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # torch raises what its zip reader and unpickler happen to raise
        kind = type(error).__name__
        raise CheckpointError(f"{path}: is not a file of plain tensors: {kind}: {error!s:.200}") from None
    found = []
    for name, shape in (("weight", (1, width)), ("bias", (1,))):
        tensor = head.get(name) if isinstance(head, dict) else None
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
            raise CheckpointError(f"{path}: {name}: expected a tensor {list(shape)}, "
                                  f"found {list(getattr(tensor, 'shape', [])) or type(tensor).__name__}")
        if not torch.isfinite(tensor.float()).all():
            raise CheckpointError(f"{path}: {name}: is not finite")
        found.append(tensor.float().reshape(-1).tolist())
    return found[0], found[1][0]


def chat_frame(base: Path) -> tuple[str, str]:
    """What the tokenizer's chat template puts before and after one user message: generation prompt, thinking off."""
    transformers = import_extra("transformers")
    marker = "\x00message\x00"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(base, local_files_only=True)
        chat = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False,
                                             add_generation_prompt=True, enable_thinking=False)
    except Exception as error:  # files of many formats, and a template that is a program
        raise CheckpointError(f"{base}: the chat template cannot be applied: {error!s:.300}") from None
    if chat.count(marker) != 1:
        raise CheckpointError(f"{base}: the chat template shows the message {chat.count(marker)} times, not once")
    prefix, suffix = chat.split(marker)
    return prefix, suffix


def import_extra(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise CheckpointError(f"making an export needs {name}: in the checkout, pip install '.[export]' "
                              f"({error})") from None
