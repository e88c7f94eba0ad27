# SPDX-License-Identifier: Apache-2.0
"""Answers to "which kernel will run, and why": `op_info` and `show_config`."""

from __future__ import annotations

import difflib
from typing import Any

from ipex_core import ops as _ops  # noqa: F401  (registers all ops)
from ipex_core.errors import IpexError, UnknownOpError
from ipex_core.kernels import providers
from ipex_core.library.kernels import specs
from ipex_core.library.spec import dtype_name

__all__ = ["op_info", "show_config"]


def op_info(name: str) -> dict[str, Any]:
    """Tell which kernels stand behind an op.

    Args:
        name: Name of the op, for instance ``"rms_norm"``.

    Returns:
        A dictionary with ``op``, ``schema``, ``summary``, ``dtypes``, ``autocast``, ``backward``, ``provider`` (the
        package whose kernel runs on the CPU, or ``"reference"``), ``kernels`` (symbol -> ``current`` level and
        ``available`` levels) and ``stock_when`` (conditions under which the stock op is used instead, or None).

    Raises:
        UnknownOpError: No op has this name.

    Example:
        >>> op_info("rms_norm")["op"]
        'rms_norm'
    """
    spec = specs().get(name)
    if spec is None:
        near = difflib.get_close_matches(name, specs(), n=3)
        hint = (
            f"; did you mean {', '.join(near)}?"
            if near
            else f"; known ops: {', '.join(sorted(specs()))}"
        )
        raise UnknownOpError(f"no op is named {name!r}{hint}")
    provider = providers.provider_for("cpu")
    implements = provider is not None and name in provider.ops
    kernels = provider.kernels(name) if provider is not None and implements else ()
    return {
        "op": name,
        "schema": spec.name + spec.schema,
        "summary": spec.summary,
        "dtypes": [dtype_name(d) for d in spec.dtypes],
        "autocast": spec.autocast,
        "backward": "function" if callable(spec.backward) else spec.backward,
        "provider": provider.name if provider is not None and implements else "reference",
        "kernels": {
            k.symbol: {"current": k.current, "available": list(k.available)} for k in kernels
        },
        "stock_when": provider.stock_when.get(name) if provider is not None else None,
    }


def show_config() -> str:
    """Return the configuration and the state of all packages as text, for bug reports.

    What is wrong with either is part of the text: a value that is not allowed, a package that cannot be loaded, a
    demand (``IPEX_CPU_ISA``) that cannot be met.

    Returns:
        Some lines: versions, each variable with its value and where that comes from, kernel packages, components.

    Example:
        >>> print(show_config())  # doctest: +ELLIPSIS
        ipex-core ..., torch ...
        <BLANKLINE>
        configuration:
          IPEX_CPU_ISA = ...
    """
    import torch

    from ipex_core import _version, config

    lines = [f"ipex-core {_version.__version__}, torch {torch.__version__}", "", "configuration:"]
    for setting in config.settings():
        shown = setting.error or setting.source
        lines.append(f"  {setting.variable.name} = {_shown(setting.value)} ({shown})")
    lines += ["", "kernel packages:"]
    try:
        statuses = providers.load_providers()
    except IpexError as error:
        statuses = ()
        lines.append(f"  cannot be loaded: {error}")
    for status in statuses:
        text = f"  {status.name}: {status.state}"
        if status.info is not None:
            text += f", {status.distribution} {status.info.version}, ISA level {status.info.isa}"
        if status.cause is not None:
            text += f", {status.distribution}: {status.cause}"
        lines.append(text)
    lines += ["", "components:"]
    for component in providers.components():
        version = f" {component.version}" if component.version else ""
        lines.append(f"  {component.name}: {component.state}, {component.distribution}{version}")
    return "\n".join(lines)


def _shown(value: object) -> str:
    # As it is written in the environment.
    if isinstance(value, bool):
        return str(int(value))
    return str(getattr(value, "name", value)) or "(empty)"
