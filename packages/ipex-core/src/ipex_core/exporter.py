# SPDX-License-Identifier: Apache-2.0
"""`ipex.export`: programs for other processes and for C++, and what they cannot hold."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, TensorArgument

from ipex_core.errors import ExportError
from ipex_core.library.spec import dtype_name
from ipex_core.recording import checked_arguments, checked_model, reason, record, try_model
from ipex_core.util import quiet

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
        # The symbol stands for this size, or for the size of another input that this size must equal.
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


# --- export -----------------------------------------------------------------------------------------------------------
# It is ``torch.export`` followed by AOTInductor, with what the compile backend sets for inference and with our kernels:
# layers whose packed weight belongs to an op of ours keep it, as a constant of the file. All other packed weights are
# handed over plain, because Inductor packs them itself.


#: Whether files hand dtypes over to ops of packages as they are: AOTInductor of torch 2.11 hands over the next one of
#: the list (float64 for float32).
_DTYPES_ARRIVE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
#: Where ops live whose kernels are Python code.
_PYTHON_ONLY = ("ipex_core", "ipex_quant")


def export(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Compile a model ahead of time into a ``.pt2`` file.

    The file has machine code for CPUs like this one and the weights. It runs in Python, with
    ``torch._inductor.aoti_load_package(path)`` after ``import ipex``, and in C++, with
    ``torch::inductor::AOTIModelPackageLoader`` in a program that has linked ``libipex_cpp.so``. The model is run once
    on the example inputs, without gradients, and then recorded. It is not changed.

    Args:
        model: In evaluation mode; may come from ``ipex.optimize`` or ``ipex.quantization.convert``.
        example_inputs: A tensor, a sequence of positional arguments, or a mapping of keyword arguments.
        path: Where to write; ends with ``.pt2``. A file that is there is replaced when the new one is complete.
        dynamic_shapes: Which sizes may vary, as ``torch.export.export`` takes them; None: none.
        options: As for ``torch.compile(backend="ipex")``: options of Inductor and ours.

    Returns:
        The path of the file.

    Raises:
        TypeError: ``model`` is not a module that can be exported, ``example_inputs`` has another form, or ``path``
            is no path.
        ValueError: ``model`` is in training mode or does not accept the inputs, ``path`` has another ending, or an
            option is unknown.
        OSError: The file cannot be written.
        ExportError: torch.export or Inductor refuses the model; the message has their reason.

    Example:
        >>> import tempfile
        >>> model = ipex.optimize(torch.nn.Linear(8, 4).eval())
        >>> path = ipex.export(model, torch.ones(2, 8), tempfile.mkdtemp() + "/linear.pt2")  # doctest: +SKIP
        >>> torch._inductor.aoti_load_package(str(path))(torch.ones(2, 8)).shape  # doctest: +SKIP
        torch.Size([2, 4])
    """
    from ipex_core.compiler import read_options

    module = checked_model("export", model)
    args, kwargs = checked_arguments("export", module, example_inputs)
    asked = read_options(None, options)
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"export: path must be a path, got {type(path).__name__}")
    target = Path(path)
    if target.suffix != ".pt2":
        raise ValueError(f"export: path must end with .pt2, got {os.fspath(path)!r}")
    if target.is_dir():
        raise IsADirectoryError(f"export: path must be a file, got the folder {os.fspath(path)!r}")
    # Beside the target, so that the last step is one rename; made now, so that a folder that cannot be written is told
    # before minutes of work. torch makes the file, with the permissions that files get here.
    with tempfile.TemporaryDirectory(prefix=".ipex-export-", dir=target.parent) as folder:
        unfinished = Path(folder) / target.name
        with torch.no_grad():
            try_model("export", module, args, kwargs)
            # torch's own use of what it has deprecated.
            with quiet(FutureWarning, text=".*treespec"):
                program = record("export", module, args, kwargs, dynamic_shapes)
                _check_ops(program)
                _compile(program, unfinished, asked, type(module).__name__)
        os.replace(unfinished, target)
    return target


def _check_ops(program: torch.export.ExportedProgram) -> None:
    """Refuse ops that a file cannot call."""
    stuck = {
        str(node.target)
        for node in program.graph.nodes
        if getattr(node.target, "namespace", None) in _PYTHON_ONLY
    }
    if stuck:
        raise ExportError(
            f"export: the model must not call ops that exist in Python only, got {', '.join(sorted(stuck))}"
        )
    changed = set() if _DTYPES_ARRIVE else _given_a_dtype(program.graph)
    if changed:
        raise ExportError(
            f"export: a model that calls {', '.join(sorted(changed))} needs torch 2.12 or later, got"
            f" {torch.__version__}, whose files pass a wrong dtype to these ops: pip install 'torch>=2.12'"
        )


def _given_a_dtype(graph: torch.fx.Graph) -> set[str]:
    """Return the names of our ops that a graph calls with a dtype."""
    return {
        str(node.target)
        for node in graph.nodes
        if getattr(node.target, "namespace", None) == "ipex"
        and any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values()))
    }


def _compile(program: torch.export.ExportedProgram, path: Path, asked: Any, name: str) -> None:
    from ipex_core.compile_backend import INFERENCE_DEFAULTS, _custom_passes
    from ipex_core.fusion import GraphReport

    patches = {**INFERENCE_DEFAULTS, **asked.inductor}
    report = GraphReport(f"export of {name}", inference=True, frozen=bool(patches["freezing"]))
    patches.update(_custom_passes(asked, patches, report, []))
    names = [
        one.arg.name
        for one in program.graph_signature.input_specs
        if one.kind == InputKind.USER_INPUT and isinstance(one.arg, TensorArgument)
    ]
    try:
        with checked_inputs(name, names, dict(program.range_constraints)):
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=patches
            )
    except Exception as error:
        raise ExportError(
            reason("export", "AOTInductor cannot compile the model", error)
        ) from error
