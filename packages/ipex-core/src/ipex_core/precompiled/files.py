# SPDX-License-Identifier: Apache-2.0
"""Precompiled models as files: the tensors as safetensors, and all the rest as JSON in its metadata.

The JSON has the steps of the plan; programs are in it as the calls of a `ProgramBuilder`, so that a file is checked as
a program is that somebody writes. A digest covers both the JSON and the tensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ipex_core._version import __version__
from ipex_core.errors import MissingComponentError
from ipex_core.kernels.providers import KERNEL_API
from ipex_core.library.spec import dtype_name
from ipex_core.precompiled.expressions import postfix
from ipex_core.precompiled.graph import Input
from ipex_core.precompiled.lower import Call, Plan, Run, Size, Slot
from ipex_core.precompiled.run import Parts
from ipex_core.program import Program, ProgramBuilder, Register
from ipex_core.program.run import encode

_ENDING = ".safetensors"
#: Keys in the metadata of the file.
_PLAN, _DIGEST = "ipex.precompiled", "ipex.digest"
_FORMAT = 1
#: Libraries whose ops a file may call, and what defines their ops if torch and ipex-core do not.
_NAMESPACES: Mapping[str, str] = {
    **dict.fromkeys(("aten", "prims", "ipex", "ipex_core", "mkldnn", "quantized"), ""),
    "ipex_quant": "ipex_quant.int8.ops",
    "quantized_decomposed": "torch.ao.quantization.fx._decomposed",
}
#: Enumerations of torch that stand among arguments.
_ENUMS: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "layout": (torch.layout, ("strided", "sparse_coo")),
    "memory_format": (
        torch.memory_format,
        ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format"),
    ),
}


def _library() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise MissingComponentError(
            "files of precompiled models need safetensors, which is not installed: pip install safetensors"
        ) from error
    return safetensors


def _path(op: str, path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{op}: path must be a path, got {type(path).__name__}")
    return Path(path)


# --- writing ----------------------------------------------------------------------------------------------------------


class _Tensors:
    """The tensors of a file, each of them once."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self._known: dict[Any, str] = {}

    def name(self, tensor: Tensor) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise ValueError(
                "Precompiled.save: the tensors of the model must be dense tensors on the CPU, got"
                f" {tensor.layout}, {dtype_name(tensor.dtype)} on {tensor.device}"
            )
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._known:
            self._known[key] = f"t{len(self.named)}"
            self.named[self._known[key]] = tensor.detach().contiguous()
        return self._known[key]

    def separate(self) -> dict[str, Tensor]:
        """Return the tensors with a memory of their own each, as safetensors wants them."""
        seen: set[int] = set()
        own = {}
        for name, tensor in self.named.items():
            start = tensor.untyped_storage().data_ptr()
            own[name] = tensor.clone() if start in seen else tensor
            seen.add(start)
        return own


def save(parts: Parts, path: Any) -> Path:
    """Write a precompiled model; see ``Precompiled.save``."""
    library = _library()
    target = _path("Precompiled.save", path)
    if target.suffix != _ENDING:
        raise ValueError(f"Precompiled.save: path must end with {_ENDING}, got {os.fspath(path)!r}")
    tensors = _Tensors()
    text = json.dumps(_document(parts, tensors), allow_nan=False, separators=(",", ":"))
    named = tensors.separate()
    metadata = {_PLAN: text, _DIGEST: _digest(text, named)}
    descriptor, unfinished = tempfile.mkstemp(prefix=".ipex-precompiled-", dir=target.parent)
    os.close(descriptor)
    try:
        library.torch.save_file(named, unfinished, metadata=metadata)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(unfinished, 0o666 & ~mask)
        os.replace(unfinished, target)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return target


def _document(parts: Parts, tensors: _Tensors) -> dict[str, Any]:
    plan = parts.plan
    return {
        "format": _FORMAT,
        "kernel_api": KERNEL_API,
        "ipex": __version__,
        "torch": torch.__version__,
        "name": parts.name,
        "inputs": [
            {
                "name": one.name,
                "dtype": None if one.dtype is None else dtype_name(one.dtype),
                "shape": list(one.shape),
                "value": _encode(one.value),
            }
            for one in parts.inputs
        ],
        "in_spec": pytree.treespec_dumps(parts.in_spec),
        "out_spec": pytree.treespec_dumps(parts.out_spec),
        "ranges": {name: list(span) for name, span in parts.ranges.items()},
        "conditions": list(parts.conditions),
        # For readers in C++, as the code of programs is.
        "expressions": {text: postfix(text) for text in _expressions(parts)},
        "memory": list(parts.memory),
        "plan": {
            "steps": [_step(step, tensors) for step in plan.steps],
            "constants": {str(i): tensors.name(t) for i, t in plan.constants.items()},
            "inputs": list(plan.inputs),
            "outputs": [_encode(one) for one in plan.outputs],
            "copied": sorted(plan.copied),
            "slots": plan.slots,
            "sizes": list(plan.sizes),
        },
    }


def _expressions(parts: Parts) -> list[str]:
    sizes = [size for one in parts.inputs for size in one.shape if isinstance(size, str)]
    return list(dict.fromkeys([*sizes, *parts.conditions, *parts.plan.sizes]))


def _step(step: Run | Call, tensors: _Tensors) -> dict[str, Any]:
    common = {"results": list(step.results), "frees": list(step.frees)}
    if isinstance(step, Call):
        kwargs = {name: _encode(value) for name, value in step.kwargs}
        return {"call": step.name, "args": _encode(step.args), "kwargs": kwargs, **common}
    program = step.program
    code, text = encode(program)
    written = {
        "code": code,
        "text": text.decode(),
        "inputs": [[r.index, r.kind, r.name] for r in program.registers_of_inputs],
        "constants": [[index, tensors.name(t)] for index, t in program.constants.items()],
        "instructions": [
            [one.op, [_encode(value) for value in one.args], list(one.results)]
            for one in program.instructions
        ],
        "outputs": list(program.outputs),
    }
    return {"run": written, "inputs": [_encode(one) for one in step.inputs], **common}


def _encode(value: Any) -> Any:
    """Return a value of a plan as JSON has it."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (list, tuple)):
        return [_encode(one) for one in value]
    if isinstance(value, Slot):
        return {"slot": value.index}
    if isinstance(value, Size):
        return {"size": value.index}
    if isinstance(value, Register):
        return {"register": value.index, "kind": value.kind}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for name, (kind, _) in _ENUMS.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    raise ValueError(
        "Precompiled.save: the arguments of the model must be tensors, numbers and texts, got a"
        f" {type(value).__name__}"
    )


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {dtype_name(tensor.dtype)} {list(tensor.shape)}".encode())
        size = tensor.numel() * tensor.element_size()
        if size:
            found.update((ctypes.c_char * size).from_address(tensor.data_ptr()))
    return found.hexdigest()


# --- reading ----------------------------------------------------------------------------------------------------------


def load(path: Any) -> Parts:
    """Read a precompiled model; see ``load_precompiled``."""
    library = _library()
    file = _path("load_precompiled", path)
    with open(file, "rb"):  # a missing file is told in Python's words
        pass
    try:
        with library.safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except library.SafetensorError as error:
        raise _wrong(file, f"a complete safetensors file, got {error}") from error
    text = metadata.get(_PLAN)
    if text is None:
        raise _wrong(file, "written by Precompiled.save, got a safetensors file without a program")
    if _digest(text, tensors) != metadata.get(_DIGEST):
        raise _wrong(file, "as Precompiled.save wrote it, got other contents: write it again")
    try:
        document = json.loads(text)
        version = document["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise _wrong(file, f"written by Precompiled.save, got {error}") from error
    for what, known, got in (
        ("format", _FORMAT, version),
        ("kernel API", KERNEL_API, document.get("kernel_api")),
    ):
        if got != known:
            raise _wrong(
                file,
                f"of {what} {known}, which ipex-core {__version__} reads, got {got} (written by ipex-core"
                f" {document.get('ipex')}): call ipex.precompile again",
            )
    try:
        return _parts(document, tensors)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise _wrong(file, f"a program that can be built, got one where {error}") from error


def _wrong(file: Path, expected: str) -> ValueError:
    return ValueError(f"load_precompiled: {os.fspath(file)!r} must be {expected}")


def _parts(document: dict[str, Any], tensors: Mapping[str, Tensor]) -> Parts:
    written = document["plan"]
    plan = Plan(
        tuple(_read_step(step, tensors) for step in written["steps"]),
        {int(i): tensors[name] for i, name in written["constants"].items()},
        tuple(map(int, written["inputs"])),
        tuple(_decode(one) for one in written["outputs"]),
        frozenset(written["copied"]),
        int(written["slots"]),
        tuple(written["sizes"]),
    )
    inputs = tuple(
        Input(
            one["name"],
            None if one["dtype"] is None else _dtype(one["dtype"]),
            tuple(one["shape"]),
            _decode(one["value"]),
        )
        for one in document["inputs"]
    )
    least, most = document["memory"]
    return Parts(
        document["name"],
        plan,
        inputs,
        _spec(document["in_spec"]),
        _spec(document["out_spec"]),
        {name: (low, high) for name, (low, high) in document["ranges"].items()},
        tuple(document["conditions"]),
        (least, most),
    )


def _spec(text: str) -> Any:
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        raise ValueError(
            f"results of a class that is not imported ({error}): import it first"
        ) from error


def _read_step(step: dict[str, Any], tensors: Mapping[str, Tensor]) -> Run | Call:
    results, frees = tuple(map(int, step["results"])), tuple(map(int, step["frees"]))
    if "call" in step:
        kwargs = tuple((name, _decode(value)) for name, value in step["kwargs"].items())
        args: Any = _decode(step["args"])
        return Call(_op(step["call"]), args, kwargs, results, frees)
    inputs = tuple(_decode(one) for one in step["inputs"])
    return Run(_program(step["run"], tensors), inputs, results, frees)


def _program(written: dict[str, Any], tensors: Mapping[str, Tensor]) -> Program:
    builder = ProgramBuilder()
    known: dict[tuple[str, int], Register] = {}
    for index, kind, name in written["inputs"]:
        make = builder.input if kind == "tensor" else builder.input_int
        known[kind, index] = make(name)
    for index, name in written["constants"]:
        known["tensor", index] = builder.constant(tensors[name])
    for op, args, results in written["instructions"]:
        found = builder.call(op, *(_decode(value, known) for value in args))
        values: Sequence[Any] = found if isinstance(found, tuple) else (found,)
        for index, register in zip(results, values, strict=True):
            known["tensor", index] = register
    return builder.build([known["tensor", index] for index in written["outputs"]])


def _decode(value: Any, registers: Mapping[tuple[str, int], Register] | None = None) -> Any:
    """Return a value of a plan from what `_encode` made of it."""
    if isinstance(value, list):
        return tuple(_decode(one, registers) for one in value)
    if not isinstance(value, dict):
        return value
    ((kind, given),) = [item for item in value.items() if item[0] != "kind"]
    match kind:
        case "float":
            return float(given)
        case "slot":
            return Slot(int(given))
        case "size":
            return Size(int(given))
        case "dtype":
            return _dtype(given)
        case "device":
            return torch.device(given)
        case "register" if registers is not None:
            return registers[value["kind"], given]
        case kind if kind in _ENUMS and given in _ENUMS[kind][1]:
            return getattr(torch, given)
    raise ValueError(
        f"a value must be of a kind that plans have, got {kind!r}: write the file again"
    )


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a dtype must be one of torch, got {name!r}")
    return found


def _op(name: str) -> Any:
    """Return an op of torch by name; a file must not name one that does more than compute."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    if namespace not in _NAMESPACES:
        raise ValueError(f"an op must be of {', '.join(_NAMESPACES)}, got {name!r}")
    if _NAMESPACES[namespace]:
        importlib.import_module(_NAMESPACES[namespace])
    op = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    schema = op._schema
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    reads_files = base in ("from_file", "save", "load")
    if schema.is_mutable or reads_files or not (takes_tensors or base in _FACTORIES):
        raise ValueError(f"an op must compute and do nothing else, got {name!r}")
    return op


#: Ops that make tensors of numbers.
_FACTORIES = (
    *("arange", "full", "zeros", "ones", "iota", "scalar_tensor", "empty", "linspace", "eye"),
    *("rand", "randn", "randint", "tril_indices", "triu_indices"),
)
