# SPDX-License-Identifier: Apache-2.0
"""One wrong argument at a time: what each op says of it names the op, the argument, what it must be and what came."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import os
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import ipex_core
from ipex_core.errors import OpArgumentError
from ipex_core.library.kernels import specs
from ipex_core.library.spec import OpSpec, Sample, dtype_name

Tensor = torch.Tensor

#: What an op of ours says: `<op>: <argument> must <expectation>, got <value>`.
FORM = re.compile(r"(?s)^(?P<op>\w+): (?P<argument>.+?) must (?P<expected>.+), got (?P<got>.+)$")
#: What torch says of a value that the schema does not allow, or of a device without a kernel.
TORCH = re.compile(
    r"^ipex::\w+\(\) (Expected a value of type|is missing value for argument)|^Could not run 'ipex::"
    r"|^(Overloaded torch operator invoked|Unable to cast)"
)
#: A rank that does not take part.
ABSENT = re.compile(r"did not arrive within|is missing: another rank")
#: Part of the path of the files whose checks are counted.
OURS = f"{os.sep}ipex_core{os.sep}"
#: Values that say only that something is wrong.
VAGUE = re.compile(r"^(an)?other|^(a )?different|^wrong", re.IGNORECASE)


def fullest(spec: OpSpec) -> Sample:
    """Return the sample with the most arguments that are not None, of these one without sizes of 1, and small."""

    def rank(sample: Sample) -> tuple[int, ...]:
        tensors = list(_tensors((*sample.args, *sample.kwargs.values())))
        if not all(one.numel() for one in tensors):
            return (-1,)
        given = sum(one is not None for one in (*sample.args, *sample.kwargs.values()))
        ones = sum(1 in one.shape for one in tensors)
        return (given, -len(tensors) // 8, -ones, -sum(one.numel() for one in tensors))

    return max(spec.samples(spec.dtypes[0]), key=rank)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def wrong_tensors(x: Tensor) -> Iterator[Tensor]:
    """Yield tensors of another dtype, rank, size, device, layout or value."""
    yield x.to(torch.int16)
    yield x.to(torch.float64)
    yield x.to(torch.int32 if x.dtype == torch.int64 else torch.int64)
    yield x[None]
    yield x.new_zeros((3, *x.shape, 3))
    yield x.new_zeros(())
    yield x.new_zeros(0)
    yield x.to("meta")
    for dim, size in enumerate(x.shape):
        if size:
            yield x.narrow(dim, 0, size - 1).clone()
            yield torch.cat([x, x.narrow(dim, 0, 1)], dim)
    if x.dim() and x.shape[0] > 1:
        yield x[:1].expand_as(x)
    if x.dtype.is_floating_point:
        for value in (math.nan, math.inf, -1.0, 0.0):
            yield torch.full_like(x, value)
    elif x.dtype != torch.bool:
        for value in (-1, 100, 1 << 20):
            yield torch.full_like(x, value, dtype=torch.int64).to(x.dtype)


def wrong_values(value: Any, kind: str) -> Iterator[Any]:
    """Yield values that one argument may not have, or may: whatever its type in the schema allows."""
    if isinstance(value, Tensor):
        yield from wrong_tensors(value)
    elif isinstance(value, (list, tuple)):
        yield []
        yield [*value, *value[:1]]
        for i, one in enumerate(value[:2]):
            for wrong in wrong_values(one, kind):
                yield [*value[:i], wrong, *value[i + 1 :]]
    elif isinstance(value, (bool, torch.dtype)) or value is None:
        if isinstance(value, torch.dtype):
            yield from (torch.int16, torch.float64, torch.complex64)
        elif "Tensor" in kind:
            yield torch.zeros(3, 2, dtype=torch.int16)
            yield torch.zeros(2, 3, 5)
    elif isinstance(value, int):
        yield from (0, -1, -(1 << 40), value + 1, value - 1, 1 << 40)
    elif isinstance(value, float):
        yield from (math.nan, math.inf, -math.inf, -1.0, 0.0, 2.0, 1e300)
    elif isinstance(value, str):
        yield from ("", "no such thing")


def changed(spec: OpSpec) -> Iterator[dict[str, Any]]:
    """Yield the arguments of calls that differ from the fullest sample by one value."""
    schema = torch._C.parse_schema(f"ipex::{spec.name}{spec.schema}")
    sample = fullest(spec)
    good = dict(zip((one.name for one in schema.arguments), sample.args, strict=False))
    good |= sample.kwargs
    for argument in schema.arguments:
        kind = str(argument.type)
        value = good.get(argument.name, argument.default_value)
        for wrong in wrong_values(value, kind):
            copies = tree_map_only(Tensor, Tensor.clone, good)
            yield {**copies, argument.name: wrong}
        if "Optional" in kind and good.get(argument.name) is not None:
            yield {**tree_map_only(Tensor, Tensor.clone, good), argument.name: None}


def shown(value: Any) -> Iterator[str]:
    """Yield what a message may show of a value."""
    if isinstance(value, Tensor):
        yield from (str(list(value.shape)), f"{value.dim()}-D", dtype_name(value.dtype))
        yield from (str(value.device), str(value.numel()), *map(str, value.shape))
        yield from ("stride", "contiguous", "elements", "header", "a tensor", "NaN")
        if not value.is_meta and value.dtype != torch.bool and not value.is_complex():
            yield from (f"{one:g}" for one in value.flatten()[:4096].double().tolist())
            yield from (str(one) for one in value.flatten()[:4096].tolist())
    elif isinstance(value, (list, tuple)):
        yield from (str(len(value)), str(list(value)))
        for one in value:
            yield from shown(one)
    elif isinstance(value, torch.dtype):
        yield dtype_name(value)
    elif isinstance(value, float):
        yield from (f"{value:g}", str(value))
    elif isinstance(value, int):
        yield from (str(value), f"{value:g}")
    else:
        yield str(value)


def faults(spec: OpSpec, arguments: dict[str, Any], message: str) -> Iterator[str]:
    """Yield what a message lacks."""
    schema = torch._C.parse_schema(f"ipex::{spec.name}{spec.schema}")
    values = {one.name: one.default_value for one in schema.arguments} | arguments
    found = FORM.match(message)
    if not found:
        yield "has not the form `op: argument must ..., got ...`"
        return
    if found["op"] != spec.name:
        yield f"names {found['op']}"
    named = values.keys() & set(re.findall(r"\w+", found["argument"]))
    if not named:
        yield "names no argument"
    if VAGUE.search(found["got"]):
        yield "does not show what came"
    if found["expected"].endswith((f" {found['got']}", f"({found['got']})")):
        yield "shows what was expected"
    if not any(one in found["got"] for name in named for one in shown(values[name])):
        yield "shows something else"


def python(spec: OpSpec) -> Callable[..., Any]:
    """Return the op without its native kernel: the check, then the reference."""
    schema = torch._C.parse_schema(f"ipex::{spec.name}{spec.schema}")

    def call(**arguments: Any) -> None:
        bound = spec.bind(**arguments)
        spec.check(bound)
        values = [bound.__dict__[argument.name] for argument in schema.arguments]
        if not any(one.is_meta for one in _tensors(values)):
            spec.reference(*values)

    return call


#: File and line of a check or ``raise``, and what its message lacks.
Refused = tuple[str, int, list[str]]


@functools.cache
def refused(op: str, native: bool) -> list[Refused]:
    """Make all wrong calls of an op; return what was raised."""
    spec = specs()[op]
    call = spec.op if native else python(spec)
    found = []
    for arguments in changed(spec):
        try:
            with torch.no_grad():
                call(**arguments)
        except Exception as error:
            text = str(error)
            frames = traceback.extract_tb(error.__traceback__)
            own = [f for f in frames if f.name not in ("check", "require") and OURS in f.filename]
            if isinstance(error, OpArgumentError) or text.startswith(f"{op}: "):
                # Another rank does not come: no argument of this call is wrong.
                wrong = [] if ABSENT.search(text) else list(faults(spec, arguments, text))
            else:
                wrong = [] if TORCH.search(text) else [f"{type(error).__name__} of a foreign form"]
            file, line = (own[-1].filename, own[-1].lineno or 0) if own else ("", 0)
            found.append((file, line, [f"{one}: {text[:300]}" for one in wrong]))
    return found


@pytest.mark.parametrize("op", list(specs()))
@pytest.mark.parametrize("native", [False, True], ids=["python", "op"])
def test_each_refusal_says_what_is_wrong(op, native):
    wrong = [text for _, _, texts in refused(op, native) for text in texts]
    assert not wrong, "\n".join(sorted(set(wrong)))


def checks(folder: Path) -> set[tuple[str, int]]:
    """Return file and first line of each check and ``raise`` of the ops."""
    found = set()
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "id", getattr(called, "attr", ""))
            if name in ("check", "require") or isinstance(node, ast.Raise):
                found.add((str(path), node.lineno))
    return found


def test_most_checks_are_reached():
    """The rest needs two wrong arguments, or tensors too large for a test."""
    known = checks(Path(ipex_core.__file__).parent / "ops")
    reached = {(file, line) for op in specs() for file, line, _ in refused(op, False)}
    assert len(known & reached) >= 0.8 * len(known), sorted(known - reached)


class _Other:
    def __repr__(self) -> str:
        return "<other>"


#: What is passed for each argument of a public function.
ANYTHING = (
    *(None, True, "no such thing", "", -1, 0, 7, 1.5, math.nan, (), [1, -2], {"a": 1}, _Other()),
    *(torch.zeros(2, 3), torch.int16, torch.float64, torch.device("meta"), nn.Linear(3, 4), len),
)
#: Arguments whose errors others raise: the model that is called with them, or the reader of a checkpoint.
PASSED_ON = {"sample_input", "low_precision_checkpoint"}


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def _trained() -> dict[str, Any]:
    model = _small().train()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}


def _prepare() -> dict[str, Any]:
    from ipex_quant import default_static_qconfig_mapping

    x = torch.ones(2, 8)
    return {"model": _small(), "configure": default_static_qconfig_mapping, "example_inputs": x}


def _convert() -> dict[str, Any]:
    from ipex_quant import prepare

    model = prepare(**_prepare())
    model(torch.ones(2, 8))
    return {"model": model}


def _decoder() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(**shape, **heads)
    return {"model": transformers.LlamaForCausalLM._from_config(config).eval()}


def _pool(**others: Any) -> dict[str, Any]:
    from ipex_runtime import CPUPool

    cpus = sorted(os.sched_getaffinity(0))[:1]
    return {"cpu_pool": CPUPool(cpus), **others}


#: Module, name, and good arguments of public functions and classes.
PUBLIC: dict[str, Callable[[], dict[str, Any]]] = {
    "ipex_core.optimize": lambda: {"model": _small()},
    "ipex_core.optimize training": _trained,
    "ipex_quant.prepare": _prepare,
    "ipex_quant.convert": _convert,
    "ipex_llm.optimize": _decoder,
    "ipex_runtime.CPUPool": lambda: {"core_ids": sorted(os.sched_getaffinity(0))[:1]},
    "ipex_runtime.CPUPool node": lambda: {"node_id": 0},
    "ipex_runtime.MultiStreamModule": lambda: _pool(model=_small(), num_streams=1),
    "ipex_runtime.Task": lambda: _pool(module=_small()),
    "ipex_runtime.get_default_num_streams": _pool,
    "ipex_runtime.place_memory": lambda: {"target": torch.ones(2), "mode": "local"},
    "ipex_runtime.set_memory_policy": lambda: {"mode": "default"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", list(PUBLIC))
def test_public_functions_name_the_argument_and_show_what_came(path):
    module, _, name = path.split()[0].rpartition(".")
    function = getattr(pytest.importorskip(module), name)
    known = inspect.signature(function).parameters
    wrong, raised = set(), 0
    for argument in known:
        for value in ANYTHING:
            arguments = {**PUBLIC[path](), argument: value}
            try:
                function(**arguments)
            except Exception as error:
                raised += 1
                text = str(error)
                found = FORM.match(text)
                named = found and known.keys() & set(re.findall(r"\w+", found["argument"]))
                ours = found and named and not VAGUE.search(found["got"])
                if not ours and argument not in PASSED_ON:
                    wrong.add(f"{argument}={value!r}: {type(error).__name__}: {text[:300]}")
    assert raised
    assert not wrong, "\n".join(sorted(wrong))
