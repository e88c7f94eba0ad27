# SPDX-License-Identifier: Apache-2.0
"""One page per op of ``torch.ops.ipex``, and their index."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch
from sphinx.ext.napoleon import Config
from sphinx.ext.napoleon.docstring import GoogleDocstring

from ipex_core.diagnostics.explain import op_info
from ipex_core.kernels.providers import provider_for
from ipex_core.library.kernels import specs
from ipex_core.library.spec import OpSpec

__all__ = ["pages"]

_NAPOLEON: Any = Config(napoleon_use_param=False, napoleon_use_rtype=False)

_AUTOCAST = {
    None: "none: the op runs in the dtype of its inputs",
    "lower_precision": "inputs are cast to the dtype of the autocast region",
    "lower_precision_unless_packed": (
        "inputs are cast to the dtype of the autocast region, unless one is packed"
    ),
    "widest_type": "inputs of different dtypes are cast to float32",
    "float32": "inputs are cast to float32",
}


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    found = {f"ops/{name}.md": op_page(spec) for name, spec in specs().items()}
    found["ops/index.md"] = index_page(specs().values())
    return found


def index_page(all_specs: Iterable[OpSpec]) -> str:
    """Return the table of all ops."""
    rows = sorted(all_specs, key=lambda spec: spec.name)
    table = [f"| [`{s.name}`]({s.name}.md) | {s.summary} | {dtypes(s)} |" for s in rows]
    tree = [spec.name for spec in rows]
    return "\n".join(
        [
            "# Ops",
            "",
            "Every op is called as `torch.ops.ipex.<name>(...)` once `ipex` (or `ipex_core`) is imported. Each has a",
            "reference in plain PyTorch that runs on any device, differentiates and compiles; an installed kernel",
            "package makes it fast. These pages are generated from the specifications.",
            "",
            "| Op | What it does | Dtypes |",
            "|---|---|---|",
            *table,
            "",
            "```{toctree}",
            ":hidden:",
            "",
            *tree,
            "```",
            "",
        ]
    )


def op_page(spec: OpSpec) -> str:
    """Return the page of one op."""
    lines = [
        f"# {spec.name}",
        "",
        f"{spec.summary}.",
        "",
        "```text",
        f"torch.ops.ipex.{spec.name}{spec.schema}",
        "```",
        "",
        *docstring(spec),
        "",
        "## Properties",
        "",
        "| | |",
        "|---|---|",
        f"| Dtypes | {dtypes(spec)} |",
        f"| Autocast | {_AUTOCAST[spec.autocast]} |",
        f"| Gradient | {gradient(spec)} |",
        "| `torch.compile` | one graph, no break; shapes may be dynamic |",
        "",
        *accuracy(spec),
        *kernels(spec),
        *benchmark(spec),
    ]
    return "\n".join(lines) + "\n"


def gradient(spec: OpSpec) -> str:
    """Return where the gradients of an op come from."""
    if callable(spec.backward):
        return "computed by an op of its own"
    return "of the reference" if spec.backward else "none"


def accuracy(spec: OpSpec) -> list[str]:
    """Return the section about tolerances."""
    if not spec.backward:
        return ["## Accuracy", "", "Exact: the bytes are those of the reference.", ""]
    return [
        "## Accuracy",
        "",
        "A kernel is compared with the reference computed in higher precision, on all samples of the specification.",
        "",
        "| Dtype | Relative tolerance | Absolute tolerance |",
        "|---|---|---|",
        *(
            f"| {name(dtype)} | {rtol:g} | {atol:g} |"
            for dtype, (rtol, atol) in spec.tolerance.items()
        ),
        "",
    ]


def docstring(spec: OpSpec) -> list[str]:
    """Return the reference's docstring as a block of reStructuredText."""
    text = inspect.getdoc(spec.reference) or ""
    body = str(GoogleDocstring(text, _NAPOLEON, what="function")).splitlines()
    # Outside a function directive the name of a field is printed as it is written.
    body = [re.sub(r"^:returns:", ":Returns:", line) for line in body]
    return ["```{eval-rst}", *body, "```"]


def name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtypes(spec: OpSpec) -> str:
    """Return the dtypes as a list of words."""
    return ", ".join(map(name, spec.dtypes))


def kernels(spec: OpSpec) -> list[str]:
    """Return the section about native kernels: what the packages installed for this build provide."""
    info: dict[str, Any] = op_info(spec.name)
    symbols: dict[str, dict[str, Any]] = info["kernels"]
    lines = ["## Kernels", ""]
    if not symbols and info["provider"] != "reference":
        return [*lines, "Native in `ipex-cpu-kernels`, and the same at every ISA level.", ""]
    if not symbols:
        return [
            *lines,
            "No package installed for this build has a native kernel: the reference runs.",
            "",
        ]
    lines += [
        f"Native kernels of `ipex-cpu-kernels`, each compiled for the levels {levels()}. The best level that the CPU",
        f'can run is chosen; `ipex.op_info("{spec.name}")` shows which one that is on your machine.',
        "",
        *(f"- `{symbol}`" for symbol in sorted(symbols)),
        "",
    ]
    stock = info.get("stock_when")
    conditions = [stock] if isinstance(stock, str) else list(stock or ())
    if conditions:
        lines += ["The stock op of torch is chosen instead, because it is faster:", ""]
        lines += [f"- {condition}" for condition in conditions] + [""]
    return lines


def levels() -> str:
    """Return the ISA levels of the kernels, those that this machine cannot run too."""
    provider = provider_for("cpu")
    return ", ".join(f"`{level}`" for level in provider.isa_built) if provider else "none"


def benchmark(spec: OpSpec) -> list[str]:
    """Return the section about benchmark shapes."""
    cases = list(spec.bench()) if spec.bench else []
    if not cases:
        return []
    lines = [
        "## Benchmark",
        "",
        f"`ipex bench {spec.name}` measures these shapes against stock PyTorch.",
        "",
        "| Shape | Bytes moved (bfloat16) | Floating-point operations |",
        "|---|---|---|",
    ]
    for case in cases:
        flops = f"{case.flops:,}" if case.flops else "bound by memory"
        lines.append(f"| `{case.id}` | {case.bytes(torch.bfloat16):,} | {flops} |")
    return [*lines, ""]
