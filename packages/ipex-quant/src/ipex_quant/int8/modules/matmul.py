# SPDX-License-Identifier: Apache-2.0
"""Products of activations: as modules that can be quantized, and on 8-bit integers."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import ipex_core.ops  # noqa: F401  (registers torch.ops.ipex)
from ipex_core.nn.functional import interaction
from ipex_core.ops.int8_linear import MOST_DEPTH
from ipex_quant.int8.boundary import Codes, Scale, plain
from ipex_quant.int8.modules import ScaledModule, check_floats, read_scale, result_dtype

#: Why products of activations stay float.
NOT_NAMED = "products of activations are INT8 if the configuration names them"
#: Sizes from which products are INT8 without being named. Measured on Zen 4 (docs/targets.md): 128 x 64 x 128 and
#: 128 x 128 x 64 take 0.45 of the time of float32, 32 rows the same time.
_PAYS_ROWS, _PAYS_WIDTH = 128, 64
#: Products of fewer rows are faster in float: packing the other factor takes longer than multiplying.
_LEAST_ROWS = 4
#: Names of the functions that multiply two activations, as a run shows them.
PRODUCTS = frozenset({"matmul", "__matmul__", "bmm", "baddbmm"})


class MatMul(nn.Module):
    """``a @ b`` as a module, which `ipex.quantization.prepare` can quantize.

    `prepare` puts it into forwards that it can rewrite. Use it yourself where a forward has control flow or optional
    arguments: it computes what `torch.matmul` does.
    """

    #: What a ``QConfigMapping`` calls it.
    stands_for: ClassVar[tuple[Any, ...]] = (
        torch.matmul,
        torch.bmm,
        operator.matmul,
        torch.Tensor.matmul,
        torch.Tensor.bmm,
    )

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product."""
        return torch.matmul(a, b)


class Interaction(nn.Module):
    """`ipex.nn.functional.interaction` as a module; stands in a forward that was rewritten."""

    stands_for: ClassVar[tuple[Any, ...]] = (interaction,)

    def forward(self, *args: Tensor) -> Tensor:
        """Return the first vector and the products of all pairs."""
        return interaction(*args)


@dataclasses.dataclass
class Product:
    """One product of activations.

    Attributes:
        path: Path of its module.
        qconfig: Its configuration.
        sources: The values that it multiplies.
        result: The value that comes out.
        codes: Whether that is codes.
    """

    path: str
    qconfig: Any
    sources: tuple[int, ...]
    result: int
    codes: bool = False


def why_float(shapes: Sequence[tuple[int, ...]], always: bool) -> str:
    """Return why a product of activations stays float, or an empty string.

    Args:
        shapes: Of the factors.
        always: Whether the configuration names it.
    """
    if any(len(shape) < 2 for shape in shapes):
        return "no INT8 product of vectors"
    if shapes[0][-1] > MOST_DEPTH:
        return f"INT8 products have at most {MOST_DEPTH} columns, not {shapes[0][-1]}"
    if len(shapes) != 2:
        return "" if always else NOT_NAMED
    (rows, depth), columns = shapes[0][-2:], shapes[1][-1]
    if always and rows < _LEAST_ROWS:
        return f"products of fewer than {_LEAST_ROWS} rows are faster in float"
    small = rows < _PAYS_ROWS or min(depth, columns) < _PAYS_WIDTH
    return f"{rows} x {depth} x {columns}: small {NOT_NAMED}" if small and not always else ""


def named_in(mapping: Any) -> frozenset[str]:
    """Return which functions of products a ``QConfigMapping`` names by type, as a run shows them."""
    kinds = mapping.object_type_qconfigs
    found: frozenset[str] = frozenset()
    for module, names in ((MatMul, PRODUCTS), (Interaction, frozenset({"interaction"}))):
        if any(kind in kinds for kind in (module, *module.stands_for)):
            found |= names
    return found


class Int8MatMul(ScaledModule):
    """``a @ b`` on 8-bit integers with a static scale for each factor; takes and gives float.

    Attributes:
        name: Path of the float module.
        a: Scale of the first factor.
        b: Scale of the second factor.
    """

    arguments: ClassVar = {"name": str, "a": read_scale, "b": read_scale}
    keys: ClassVar = {"name": "layer"}
    scaled = ("a", "b")
    kernel: ClassVar[str] = "int8_matmul"

    def __init__(self, a: Scale, b: Scale, name: str = "") -> None:
        super().__init__()
        self.a, self.b, self.name = a, b, name

    def forward(self, a: Any, b: Any) -> Tensor:
        """Return the product; that with a vector, or of few rows, is one of floats."""
        a, b = plain(a), plain(b)
        # A trace has one path for all sizes.
        few = torch._C._get_tracing_state() is None and a.shape[-2:][0] < _LEAST_ROWS
        if min(a.dim(), b.dim()) < 2 or few:
            return torch.matmul(a, b)
        y: Tensor = torch.ops.ipex.int8_matmul(
            a, b, self.a.scale, self.a.zero, self.b.scale, self.b.zero
        )
        return y

    def extra_repr(self) -> str:
        """Return the scales."""
        return ", ".join(
            f"{k}={s.scale:.4g}*(uint8-{s.zero})" for k, s in (("a", self.a), ("b", self.b))
        )


class Int8Interaction(ScaledModule):
    """The interaction on int8 codes with a static scale for each input; takes float.

    Gives float, or uint8 codes where the next layer takes them.

    Attributes:
        name: Path of the float module.
        scales: float32, symmetric, one for each input.
        output: Scale of codes that it gives, if it does.
    """

    arguments: ClassVar = {"name": str, "output": read_scale}
    keys: ClassVar = {"name": "layer"}
    tensors = ("scales",)
    scaled = ("output",)
    kernel: ClassVar[str] = "int8_interaction"
    scales: Tensor

    def __init__(self, scales: Tensor, output: Scale, name: str = "") -> None:
        super().__init__()
        self.output, self.name = output, name
        self.register_buffer("scales", scales)

    @classmethod
    def from_saved(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        """Return the module that `saved` described."""
        check_floats("scales", tensors["scales"], [tensors["scales"].numel()])
        return super().from_saved(about, tensors)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        return self  # scales have one dtype only

    def forward(self, *args: Any) -> Any:
        """Return the first vector and the products of all pairs."""
        like, output = result_dtype(args[0]), self.output
        inputs = [plain(x).to(like) for x in args]
        dtype = torch.uint8 if output else like
        y = torch.ops.ipex.int8_interaction(inputs, self.scales, dtype, output.scale, output.zero)
        return Codes(y, output, like) if output else y

    def extra_repr(self) -> str:
        """Return the scales."""
        low, high = (float(it) for it in self.scales.aminmax())
        text = f"{len(self.scales)} inputs, scales {low:.4g} to {high:.4g}"
        more = f", output={self.output.scale:.4g}*(uint8-{self.output.zero})"
        return text + more * bool(self.output)


def int8_product(module: nn.Module, scales: Sequence[Scale], output: Scale, name: str) -> Any:
    """Return the INT8 form of a product.

    Args:
        module: A `MatMul` or an `Interaction`.
        scales: Of its inputs.
        output: Of the codes that it is to give, or none.
        name: Its path.
    """
    if isinstance(module, MatMul):
        return Int8MatMul(scales[0], scales[1], name)
    symmetric = [it.scale * max(it.zero, 255 - it.zero) / 127 for it in scales]
    return Int8Interaction(torch.tensor(symmetric, dtype=torch.float32), output, name)
