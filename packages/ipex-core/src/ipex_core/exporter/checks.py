# SPDX-License-Identifier: Apache-2.0
"""Checks of the inputs in the code of an exported file.

AOTInductor's code reads inputs by the sizes and strides that were recorded and looks at nothing unless an environment
variable says so. Here each call compares dtype, device, rank and sizes, and copies a tensor that lies otherwise than
the recorded one into that layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ipex_core.library.spec import dtype_name

__all__ = ["checked_inputs"]

#: What the generated code calls. Its text becomes the message of a Python error, too.
_FUNCTIONS = r"""
namespace {
[[noreturn]] void ipex_refuse(const char* input, const std::string& expected, const std::string& got) {
  throw std::runtime_error(std::string(input) + " must be " + expected + ", got " + got);
}

std::string ipex_dtype_name(int32_t dtype) {
  NAMES
  return "dtype " + std::to_string(dtype);
}

void ipex_check_kind(AtenTensorHandle x, const char* input, int32_t dtype, int64_t rank) {
  int32_t got = 0;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x, &got));
  if (got != dtype) ipex_refuse(input, ipex_dtype_name(dtype), ipex_dtype_name(got));
  int32_t device = 0;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x, &device));
  if (device != aoti_torch_device_type_cpu()) ipex_refuse(input, "on the cpu", "another device");
  int64_t dim = 0;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(x, &dim));
  if (dim != rank) ipex_refuse(input, std::to_string(rank) + "-D", std::to_string(dim) + "-D");
}

std::string ipex_sizes_text(const int64_t* sizes, int64_t rank) {
  std::string text = "[";
  for (int64_t i = 0; i < rank; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

void ipex_check_size(AtenTensorHandle x, const char* input, int64_t rank, int64_t dim, int64_t low, int64_t high) {
  int64_t* sizes = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(x, &sizes));
  if (sizes[dim] >= low && sizes[dim] <= high) return;
  std::string wanted = std::to_string(low);
  if (high != low) {
    wanted = high == INT64_MAX ? "at least " + wanted : wanted + " to " + std::to_string(high);
    if (low == 0) wanted = "at most " + std::to_string(high);
  }
  ipex_refuse(input, "of size " + wanted + " in dimension " + std::to_string(dim), ipex_sizes_text(sizes, rank));
}

void ipex_lay_out(RAIIAtenTensorHandle& x, const char* input, std::initializer_list<int64_t> wanted, bool written) {
  int64_t *sizes = nullptr, *strides = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(x, &sizes));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(x, &strides));
  int64_t numel = 0;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(x, &numel));
  const int64_t rank = wanted.size();
  bool same = true;
  for (int64_t i = 0; i < rank; ++i) same &= sizes[i] == 1 || strides[i] == wanted.begin()[i];
  if (same || numel == 0) return;
  if (written) {  // a copy would take what the model writes
    ipex_refuse(
        input, "laid out with strides " + ipex_sizes_text(wanted.begin(), rank), ipex_sizes_text(strides, rank));
  }
  int32_t dtype = 0;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x, &dtype));
  AtenTensorHandle copy = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      rank, sizes, wanted.begin(), dtype, aoti_torch_device_type_cpu(), 0, &copy));
  RAIIAtenTensorHandle laid_out(copy);
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(laid_out, x, 0));
  x = std::move(laid_out);
}
}  // namespace
"""
_DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8"),
    *("bool", "complex64", "complex128"),
)

#: torch says of sizes without an upper limit that they stay below this.
_UNLIMITED = 2**62


@contextlib.contextmanager
def checked_inputs(model: str, names: Sequence[str], ranges: Mapping[Any, Any]) -> Iterator[None]:
    """Let AOTInductor write checks into the code that it makes inside of this context.

    Args:
        model: What messages call the model.
        names: What they call its tensors, in order.
        ranges: Symbol of a size that varies -> the range it was recorded with. Inductor's own may be narrower: choices
            that do not change what the code can do leave their traces there.
    """
    from torch._inductor.codegen import common

    common.init_backend_registration()
    cpu = common.device_codegens["cpu"]
    wrapper = _wrapper(cpu.cpp_wrapper_codegen, model, names, ranges)
    common.device_codegens["cpu"] = dataclasses.replace(cpu, cpp_wrapper_codegen=wrapper)
    try:
        yield
    finally:
        common.device_codegens["cpu"] = cpu


def _wrapper(base: Any, model: str, names: Sequence[str], ranges: Mapping[Any, Any]) -> Any:
    """Return a class that writes what its base writes, and the checks."""
    from torch._inductor.virtualized import V

    class Checked(base):  # type: ignore[misc]
        @staticmethod
        def create(is_subgraph: bool, *args: Any, **kwargs: Any) -> Any:
            checks = V.graph.aot_mode and not V.graph.is_const_graph and not is_subgraph
            return Checked() if checks else base.create(is_subgraph, *args, **kwargs)

        def write_prefix(self) -> None:
            super().write_prefix()
            lines = [
                f'if (dtype == aoti_torch_dtype_{name}()) return "{name}";' for name in _DTYPES
            ]
            self.prefix.splice(_FUNCTIONS.replace("NAMES", "\n  ".join(lines)))

        def codegen_inputs(self) -> None:
            inputs = _tensors(model, names)
            for name, text, value in inputs:
                dtype = dtype_name(value.get_dtype())
                kind = f"aoti_torch_dtype_{dtype}(), {len(value.get_size())}"
                self.prefix.writeline(f"ipex_check_kind({name}, {text}, {kind});")
            super().codegen_inputs()  # names the sizes that vary
            for name, text, value in inputs:
                self.prefix.splice("\n".join(_size_checks(name, text, value, ranges)))

    return Checked


def _tensors(model: str, names: Sequence[str]) -> list[tuple[str, str, Any]]:
    """Return name in the code, C++ text for messages, and value of each tensor that the graph takes."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    given = V.graph.graph_inputs
    known = names if len(names) == len(given) else [str(i) for i in range(len(given))]
    return [
        (name, json.dumps(f"{model}: input {known[i]}"), value)
        for i, (name, value) in enumerate(given.items())
        if isinstance(value, ir.TensorBox)
    ]


def _size_checks(name: str, text: str, value: Any, ranges: Mapping[Any, Any]) -> Iterator[str]:
    from torch._inductor.codegen.cpp_utils import cexpr
    from torch._inductor.virtualized import V

    sizes = list(value.get_size())
    for dim, size in enumerate(sizes):
        where = f"{name}, {text}, {len(sizes)}, {dim}"
        # A symbol is this very size, or that of another input which this one has to be equal to.
        yield f"ipex_check_size({where}, {cexpr(size)}, {cexpr(size)});"
        span = ranges.get(size)
        if span is not None:
            # 2 is what torch says of every size that varies; 1 and 0 run as well.
            low = 0 if span.lower <= 2 else int(span.lower)
            high = "INT64_MAX" if span.upper >= _UNLIMITED else str(int(span.upper))
            yield f"ipex_check_size({where}, {low}, {high});"
    if sizes:
        written = "true" if name in V.graph.mutated_inputs else "false"
        layout = ", ".join(f"static_cast<int64_t>({cexpr(s)})" for s in value.get_stride())
        yield f"ipex_lay_out({name}, {text}, {{{layout}}}, {written});"
