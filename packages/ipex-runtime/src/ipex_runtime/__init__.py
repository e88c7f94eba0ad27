# SPDX-License-Identifier: Apache-2.0
"""CPU topology, pinned thread pools and streams.

Names are imported from the module they live in when they are first used; importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ipex_runtime._version import __version__

if TYPE_CHECKING:  # for type checkers and editors; at run time see __getattr__
    from ipex_runtime import codeless as codeless
    from ipex_runtime import cpupool as cpupool
    from ipex_runtime import hypertune as hypertune
    from ipex_runtime import launch as launch
    from ipex_runtime import memory as memory
    from ipex_runtime import multi_stream as multi_stream
    from ipex_runtime import runtime_utils as runtime_utils
    from ipex_runtime import task as task
    from ipex_runtime import topology as topology
    from ipex_runtime.cpupool import CPUPool as CPUPool
    from ipex_runtime.cpupool import is_runtime_ext_enabled as is_runtime_ext_enabled
    from ipex_runtime.cpupool import pin as pin
    from ipex_runtime.memory import place_memory as place_memory
    from ipex_runtime.memory import set_memory_policy as set_memory_policy
    from ipex_runtime.multi_stream import MultiStreamBenchmarkModule as MultiStreamBenchmarkModule
    from ipex_runtime.multi_stream import MultiStreamModule as MultiStreamModule
    from ipex_runtime.multi_stream import MultiStreamModuleHint as MultiStreamModuleHint
    from ipex_runtime.multi_stream import _MultiStreamBenchmarkModule as _MultiStreamBenchmarkModule
    from ipex_runtime.multi_stream import get_default_num_streams as get_default_num_streams
    from ipex_runtime.runtime_utils import get_core_list_of_node_id as get_core_list_of_node_id
    from ipex_runtime.runtime_utils import get_num_cores_per_node as get_num_cores_per_node
    from ipex_runtime.runtime_utils import get_num_nodes as get_num_nodes
    from ipex_runtime.task import Task as Task
    from ipex_runtime.task import TaskFuture as TaskFuture
    from ipex_runtime.topology import format_cpu_list as format_cpu_list
    from ipex_runtime.topology import parse_cpu_list as parse_cpu_list

#: Module -> public names that it has.
_NAMES = {
    "cpupool": "CPUPool is_runtime_ext_enabled pin",
    "memory": "place_memory set_memory_policy",
    "multi_stream": (
        "_MultiStreamBenchmarkModule get_default_num_streams MultiStreamBenchmarkModule "
        "MultiStreamModule MultiStreamModuleHint"
    ),
    "runtime_utils": "get_core_list_of_node_id get_num_cores_per_node get_num_nodes",
    "task": "Task TaskFuture",
    "topology": "format_cpu_list parse_cpu_list",
}
#: Public name -> module that has it.
_LAZY = {name: f"ipex_runtime.{at}" for at, names in _NAMES.items() for name in names.split()}

#: Modules that have names of their own.
_MODULES: tuple[str, ...] = (
    "codeless",
    "cpupool",
    "hypertune",
    "launch",
    "memory",
    "multi_stream",
    "runtime_utils",
    "task",
    "topology",
)

__all__ = ["__version__", *(n for n in _LAZY if n[0] != "_"), *_MODULES]  # noqa: PLE0604  (the keys are strings)


def __getattr__(name: str) -> Any:
    try:
        if name in _MODULES:
            return importlib.import_module(f"ipex_runtime.{name}")
        if name in _LAZY:
            value = getattr(importlib.import_module(_LAZY[name]), name)
            globals()[name] = value
            return value
    except ModuleNotFoundError as error:
        # The topology and the launcher do without.
        if error.name not in {"psutil", "torch"}:
            raise
        raise ModuleNotFoundError(
            f"ipex_runtime.{name} needs {error.name}, which is not installed: pip install {error.name}",
            name=error.name,
        ) from None
    raise AttributeError(f"module 'ipex_runtime' has no attribute {name!r}")


def doctor(root: str = "/") -> tuple[list[tuple[str, str]], list[str]]:
    """Return what `ipex doctor` shows about the machine: (title, text) pairs, and advice.

    Args:
        root: Root of the procfs and sysfs trees.
    """
    from ipex_runtime import topology

    machine = topology.read(root)
    return machine.rows(), machine.advice()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
