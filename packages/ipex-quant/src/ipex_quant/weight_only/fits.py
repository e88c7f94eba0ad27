# SPDX-License-Identifier: Apache-2.0
"""Whether a configuration asks for a model that its weight files can fill, before memory is taken for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ipex_quant.util.safetensors import CheckpointError, read_header, weight_files

__all__ = ["building", "check_fits"]

#: Weights that a byte of a file can stand for: codes have two bits at least.
_PER_BYTE = 4
#: Numbers that no file needs to have: tables that are computed, heads that start from nothing.
_SPARE = 1 << 24
#: So many layers and experts are built without a question.
_COUNT = 4096


@contextlib.contextmanager
def building(folder: Path) -> Iterator[None]:
    """Turn what a wrong number or name in a config.json leads to into a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except MemoryError as error:
        raise CheckpointError(f"{folder} must fit the memory, got {error}") from error
    except (
        Exception
    ) as error:  # the checks of transformers and its libraries have errors of their own
        text = str(error).strip().splitlines()
        got = f"{type(error).__name__}: {text[0][:300] if text else ''}"
        raise CheckpointError(
            f"{folder} must have a config.json that fits transformers and its weights, got {got}"
        ) from error


def check_fits(
    folder: Path, config: Mapping[str, Any], make: Callable[[], nn.Module], quantized: bool
) -> None:
    """Check that the files of a folder have at least about as many weights as the model of its config.json.

    Args:
        folder: The folder.
        config: What its config.json has.
        make: Makes the model; called on the meta device.
        quantized: Whether weights may have fewer bits than a byte.

    Raises:
        CheckpointError: They have far fewer, or the model cannot be made.
    """
    entries = [e for path in weight_files(folder) for e in read_header(path).values()]
    _check_counts(folder, config, len(entries))
    with building(folder), torch.device("meta"):
        model = make()
    if quantized:
        most = _PER_BYTE * sum(entry.size for entry in entries)
    else:
        most = 2 * sum(entry.size // entry.dtype.itemsize for entry in entries)
    needed = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if needed > most + _SPARE:
        raise CheckpointError(
            f"{folder} must have the weights of its config.json, {needed:,} numbers, got files with at most {most:,}"
        )


def _check_counts(folder: Path, config: Any, tensors: int, depth: int = 0) -> None:
    """Check numbers of modules: they cost time and memory before any of them has a weight."""
    if not isinstance(config, Mapping) or depth > 4:
        return
    for name, value in config.items():
        counted = "layer" in name or "expert" in name or "block" in name
        if counted and isinstance(value, int) and value > max(_COUNT, tensors):
            raise CheckpointError(
                f"{folder} must have the weights of its config.json, {name} = {value}, got {tensors} tensors"
            )
        _check_counts(folder, value, tensors, depth + 1)
