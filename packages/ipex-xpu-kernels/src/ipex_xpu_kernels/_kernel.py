# SPDX-License-Identifier: Apache-2.0
"""A SYCL kernel that a user wrote, as something to call: its arguments are checked before it is started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

#: dtypes by the C++ type that a parameter points to. Others (vectors, own structs) are not checked.
DTYPES: dict[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "sycl::_V1::detail::half_impl::half": torch.float16,
    "sycl::_V1::ext::oneapi::bfloat16": torch.bfloat16,
    "ipex::bf16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "long long": torch.int64,
    "short": torch.int16,
    "signed char": torch.int8,
    "char": torch.int8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
}
_FLOATS = ("float", "double")
#: Bits of integers whose size is not the size of ``long``; "unsigned" may stand before them.
_BITS = {"char": 8, "signed char": 8, "short": 16, "int": 32, "": 32, "bool": 1}
#: Work-items of a group, by the number of dimensions.
_LOCAL = {1: (256,), 2: (16, 16), 3: (4, 8, 8)}


def _readable(type_name: str) -> str:
    return type_name.replace("sycl::_V1::detail::half_impl::", "sycl::").replace("_V1::", "")


class SyclKernel:
    """A kernel of a program that `load_inline` has compiled.

    Attributes:
        name: Its name, with the name of the program, for messages.
        parameters: C++ types of its parameters, such as ``"float const*"``.
        dimensions: How many sizes it is started with, where that is known.
    """

    def __init__(
        self, program: Any, library: str, name: str, dimensions: int | None = None
    ) -> None:
        self._program = program
        self._symbol = name
        self.name = f"{library}.{name}"
        self.dimensions = dimensions
        self.parameters: tuple[str, ...] = tuple(program.parameters(name))
        for parameter in self.parameters:
            if "*" not in parameter and not re.fullmatch(r"[a-z ]+", parameter):
                raise ValueError(
                    f"load_inline: {self.name} takes a {_readable(parameter)}; kernels take pointers and numbers"
                )

    def __repr__(self) -> str:
        return f"SyclKernel({self.name}({', '.join(map(_readable, self.parameters))}))"

    def check_count(self, names: Sequence[str], function: str) -> None:
        """Raise ValueError unless the kernel has as many parameters as there are names of arguments."""
        if len(names) == len(self.parameters):
            return
        wanted = ", ".join(map(_readable, self.parameters))
        raise ValueError(
            f"{function}: the kernel takes {len(self.parameters)} arguments ({wanted}), got {len(names)}"
            f" ({', '.join(names)})"
        )

    def _tensor(self, index: int, tensor: torch.Tensor, device: int) -> tuple[int]:
        parameter = self.parameters[index]
        where = f"{self.name}: argument {index + 1}"
        if "*" not in parameter:
            raise TypeError(f"{where} must be a number ({_readable(parameter)}), got a tensor")
        if tensor.device.type != "xpu" or tensor.device.index != device:
            raise ValueError(f"{where} must be on xpu:{device}, got a tensor on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{where} must be contiguous, got sizes {tuple(tensor.shape)} and strides {tensor.stride()}"
            )
        wanted = DTYPES.get(parameter.rstrip("*").strip().removesuffix(" const"))
        if wanted is not None and parameter.count("*") == 1 and tensor.dtype != wanted:
            raise TypeError(
                f"{where} must be {wanted} ({_readable(parameter)}), got {tensor.dtype}"
            )
        return (tensor.data_ptr(),)

    def _number(self, index: int, value: object) -> int | float:
        parameter = self.parameters[index]
        where = f"{self.name}: argument {index + 1}"
        if "*" in parameter:
            raise TypeError(
                f"{where} must be a tensor ({_readable(parameter)}), got {type(value).__name__}"
            )
        if parameter in _FLOATS:
            if not isinstance(value, (int, float)):
                raise TypeError(f"{where} must be a number ({parameter}), got {value!r}")
            return float(value)
        if not isinstance(value, int):
            raise TypeError(f"{where} must be an integer ({parameter}), got {value!r}")
        unsigned = parameter.startswith("unsigned") or parameter == "bool"
        bits = _BITS.get(parameter.removeprefix("unsigned").strip(), 64)
        least, most = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if not least <= value <= most:
            raise ValueError(f"{where} must be {least} to {most} ({parameter}), got {value}")
        return int(value)

    def __call__(
        self,
        *arguments: object,
        size: int | Sequence[int],
        local: int | Sequence[int] | None = None,
    ) -> None:
        """Start the kernel in the current stream.

        Args:
            arguments: For each pointer a contiguous tensor of that type on the device, or None for a null pointer; for
                each number a Python number.
            size: Number of work-items that are needed, in 1 to 3 dimensions. It is rounded up to whole groups, so that
                kernels must test their index.
            local: Work-items of a group; the default is 256, 16 x 16 or 4 x 8 x 8.

        Raises:
            ValueError: The number of arguments, a device, strides or sizes are wrong, or a number is out of range.
            TypeError: An argument has another type than the kernel's parameter.
            RuntimeError: The device cannot start such groups.
        """
        names = ["Tensor" if isinstance(a, torch.Tensor) else type(a).__name__ for a in arguments]
        self.check_count(names, self.name)
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        on_device = [t.device.index for t in tensors if t.device.type == "xpu"]
        device = on_device[0] if on_device else torch.xpu.current_device()
        values: list[object] = []
        for i, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                values.append(self._tensor(i, argument, device))
            elif argument is None and "*" in self.parameters[i]:
                values.append((0,))
            else:
                values.append(self._number(i, argument))
        sizes = (size,) if isinstance(size, int) else tuple(size)
        if not 1 <= len(sizes) <= 3 or any(s < 0 for s in sizes):
            raise ValueError(
                f"{self.name}: size must be 1 to 3 numbers of work-items, got {size!r}"
            )
        if self.dimensions not in (None, len(sizes)):
            raise ValueError(
                f"{self.name}: size must be {self.dimensions} numbers of work-items, as in"
                f" IPEX_KERNEL({self.dimensions}), got {size!r}"
            )
        groups = _LOCAL[len(sizes)] if local is None else local
        groups = (groups,) if isinstance(groups, int) else tuple(groups)
        if len(groups) != len(sizes) or any(g < 1 for g in groups):
            raise ValueError(
                f"{self.name}: local must be as many positive numbers as size, got {local!r} for {size!r}"
            )
        if 0 in sizes:
            return
        whole = [-(-s // g) * g for s, g in zip(sizes, groups, strict=True)]
        queue = torch.xpu.current_stream(device).sycl_queue
        self._program.launch(self._symbol, queue, whole, list(groups), values)
