# SPDX-License-Identifier: Apache-2.0
"""What both launchers share: the choice of libraries that are preloaded, and the environment of the instances."""

from __future__ import annotations

import argparse
import glob
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ipex_runtime._errors import LaunchArgumentError
from ipex_runtime.launch import _options
from ipex_runtime.launch._supervise import Instance
from ipex_runtime.launch.cpu_info import CPUPool, CPUPoolList
from ipex_runtime.topology.sysfs import crowded

__all__ = [
    "Launcher",
    "find_library",
    "names_library",
    "search_paths",
    "valid_preload",
]


def search_paths() -> list[str]:
    """Return the folders to search, in order: environments, the user's, then the system's."""
    folders = [
        f"{os.environ[name]}/lib"
        for name in ("CONDA_PREFIX", "VIRTUAL_ENV")
        if os.environ.get(name)
    ]
    folders.append(f"{sys.prefix}/lib")
    folders += [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    folders.append(os.path.expanduser("~/.local/lib"))
    folders += ["/usr/local/lib", "/usr/local/lib64", "/usr/lib", "/usr/lib64"]
    machine = os.uname().machine
    folders += [f"/usr/lib/{machine}-linux-gnu", f"/lib/{machine}-linux-gnu"]
    return list(dict.fromkeys(folders))


def names_library(path: str, name: str) -> bool:
    """Return whether a file name belongs to the library ``name``, of any version.

    Example:
        >>> names_library("/usr/lib/libjemalloc.so.2", "jemalloc")
        True
        >>> names_library("/usr/lib/libtcmalloc_minimal.so.4", "tcmalloc")
        True
    """
    pattern = rf"lib{re.escape(name)}(_minimal)?\.so(\.[0-9.]+)?"
    return re.fullmatch(pattern, os.path.basename(path)) is not None


def find_library(name: str, folders: Sequence[str]) -> str | None:
    """Return the path of ``lib<name>.so`` or of its lowest installed version, None if it is not installed."""
    for folder in folders:
        found = glob.glob(f"{glob.escape(folder)}/lib{name}*.so*")
        # The development link and the whole library come before versions and the minimal one.
        matches = sorted((p for p in found if names_library(p, name)), key=lambda p: (len(p), p))
        if matches:
            return matches[0]
    return None


def valid_preload(value: str) -> tuple[list[str], list[str]]:
    """Return the entries of an ``LD_PRELOAD`` that exist and those that do not.

    A name without a slash is left to the loader, which searches its own folders.
    """
    # The loader takes blanks and colons as separators.
    entries = [entry for entry in re.split(r"[:\s]+", value) if entry]
    good = [entry for entry in entries if "/" not in entry or os.path.exists(entry)]
    return good, [entry for entry in entries if entry not in good]


# --- launchers --------------------------------------------------------------------------------------------------------


#: Rounds that libgomp spins for a thread before it sleeps, where programs wait for CPU time and elsewhere; its own
#: number is 300000. See docs/tuning.md.
SHORT_SPIN, LONG_SPIN = "3000", "30000"
#: Settings of jemalloc: memory goes back in the background, or (for measurements) never.
MALLOC_CONF = "oversize_threshold:1,background_thread:true,metadata_thp:auto"
MALLOC_CONF_BENCHMARK = (
    "oversize_threshold:1,background_thread:false,metadata_thp:always,"
    "dirty_decay_ms:-1,muzzy_decay_ms:-1"
)


class Launcher:
    """Base of the launchers.

    Args:
        logger: A `logging.Logger`, or None: warnings are printed to stderr.
        lscpu_txt: Text of ``lscpu --all --extended`` of some machine; empty: this machine.

    Attributes:
        cpuinfo: The CPUs, a `CPUPoolList`.
        library_paths: Folders that are searched for libraries.
        ld_preload: Entries of ``LD_PRELOAD`` for the instances.
        environ_set: Environment variables for the instances.
    """

    ma_supported = _options.ALLOCATORS
    omp_supported = _options.OMP_RUNTIMES
    strategy_supported = _options.STRATEGIES

    def __init__(self, logger: Any = None, lscpu_txt: str = "") -> None:
        self.logger = logger
        self.cpuinfo = CPUPoolList(logger, lscpu_txt)
        self.library_paths = search_paths()
        self.environ_set: dict[str, str] = {}
        self._kept: set[str] = set()
        self.ld_preload, missing = valid_preload(os.environ.get("LD_PRELOAD", ""))
        for entry in missing:
            self.verbose("warning", f"{entry} of LD_PRELOAD does not exist and is left out")

    def add_common_params(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of all instances to a parser."""
        _options.add_common(parser)

    def verbose(self, level: str, msg: str, warning_type: Any = None) -> None:
        """Write a note of ``level`` ``"info"`` or ``"warning"``."""
        self.cpuinfo.verbose(level, msg, warning_type)

    def launch(self, args: argparse.Namespace) -> None:
        """Run the instances. Implemented by the sub-classes."""
        raise NotImplementedError

    # -- libraries -----------------------------------------------------------------------------------------------------

    def add_lib_preload(self, lib_type: str) -> bool:
        """Preload ``lib<lib_type>.so``; returns whether it was found or is preloaded already."""
        if any(names_library(entry, lib_type) for entry in self.ld_preload):
            return True
        path = find_library(lib_type, self.library_paths)
        if path is None:
            return False
        self.ld_preload.append(path)
        return True

    def check_env(self, env_name: str, env_value: Any) -> Any:
        """Return the value that the variable has already, with a warning, or the new one."""
        value = os.environ.get(env_name, "")
        if value in ("", str(env_value)):
            return env_value
        if env_name not in self._kept:  # once, not for each instance
            self._kept.add(env_name)
            self.verbose(
                "warning",
                f"{env_name}={value} of the environment is kept; without it ipexrun would set {env_value}",
            )
        return value

    def add_env(self, env_name: str, env_value: str) -> None:
        """Set a variable for the instances, unless the environment has it."""
        self.environ_set[env_name] = str(self.check_env(env_name, env_value))

    def set_lib_bin_from_list(
        self,
        name_input: str,
        name_map: Mapping[str, Sequence[str]],
        category: str,
        supported: Sequence[str],
        fn: Callable[[str], bool],
        skip_list: Sequence[str] | None = None,
        extra_warning_msg_with_default_choice: str = "",
    ) -> str:
        """Choose a library or program.

        Args:
            name_input: The choice of the user.
            name_map: For each choice the name that ``fn`` searches, and how to install it.
            category: What it is, for messages.
            supported: ``["auto", <choice without a library>, <others, best first>...]``.
            fn: Searches; returns whether it was found.
            skip_list: Choices that are not possible now.
            extra_warning_msg_with_default_choice: Said where a library is not found.

        Returns:
            The choice, never ``"auto"``; where the wanted one is not there, the second of ``supported``.

        Raises:
            LaunchArgumentError: A choice that is not supported.
        """
        auto, default, *others = supported
        wanted = name_input.lower()
        if wanted not in supported:
            raise LaunchArgumentError(
                f"ipexrun: the {category} must be one of {', '.join(supported)}, got {name_input!r}"
            )
        if wanted in (skip_list or ()):
            self.verbose(
                "warning", f"the {category} {wanted} is not possible here: choosing another"
            )
            wanted = auto
        possible = [name for name in others if name not in (skip_list or ())]
        candidates = possible if wanted == auto else [name for name in others if name == wanted]
        chosen = next((name for name in candidates if fn(name_map[name][0])), default)
        hints = [f"{name}: {name_map[name][1]}" for name in candidates if name_map[name][1]]
        advice = f" To install {'; '.join(hints)}." if hints else ""
        if chosen == default and candidates:
            level = "info" if wanted == auto else "warning"
            found = f"{category}: no {' or '.join(candidates)} found, using {default}."
            extra = f" {extra_warning_msg_with_default_choice}" * bool(
                extra_warning_msg_with_default_choice
            )
            self.verbose(level, f"{found}{extra}{advice}")
        else:
            self.verbose("info", f"{category}: {chosen}{' (found)' if wanted == auto else ''}")
        if fn == self.add_lib_preload:
            for name, (library, *_) in name_map.items():
                if name != chosen:
                    self.ld_preload = [p for p in self.ld_preload if not names_library(p, library)]
        return chosen

    def set_memory_allocator(
        self,
        memory_allocator: str = "auto",
        benchmark: bool = False,
        skip_list: Sequence[str] | None = None,
    ) -> str:
        """Choose the memory allocator and return it: ``"tcmalloc"``, ``"jemalloc"`` or ``"default"``."""
        chosen = self.set_lib_bin_from_list(
            memory_allocator,
            {
                "tcmalloc": [
                    "tcmalloc",
                    "conda install gperftools or apt install libgoogle-perftools4",
                ],
                "jemalloc": ["jemalloc", "conda install jemalloc or apt install libjemalloc2"],
            },
            "memory allocator",
            self.ma_supported,
            self.add_lib_preload,
            skip_list,
            "Models that allocate much run faster with one.",
        )
        if chosen == "jemalloc":
            self.add_env("MALLOC_CONF", MALLOC_CONF_BENCHMARK if benchmark else MALLOC_CONF)
        return chosen

    def set_omp_runtime(self, omp_runtime: str = "auto", set_kmp_affinity: bool = True) -> str:
        """Choose the OpenMP runtime and return it: ``"intel"`` or ``"default"``, the one that torch has."""
        chosen = self.set_lib_bin_from_list(
            omp_runtime,
            {"intel": ["iomp5", "pip install intel-openmp"]},
            "OpenMP runtime",
            self.omp_supported,
            self.add_lib_preload,
        )
        if chosen == "intel":
            if set_kmp_affinity:
                self.add_env("KMP_AFFINITY", "granularity=fine,compact,1,0")
            self.add_env("KMP_BLOCKTIME", "1")
        else:
            self.add_env("OMP_SCHEDULE", "STATIC")
            self.add_env("OMP_PROC_BIND", "CLOSE")
            if not os.environ.get("OMP_WAIT_POLICY"):
                reason = crowded(Path("/"))
                spin = SHORT_SPIN if reason else LONG_SPIN
                self.add_env("GOMP_SPINCOUNT", spin)
                if reason:
                    self.verbose("info", f"{reason}: threads spin shortly, GOMP_SPINCOUNT={spin}")
        return chosen

    def parse_list_argument(self, txt: str) -> list[int]:
        """Return the numbers of ``"0,2-4"``, sorted, each once.

        Raises:
            LaunchArgumentError: The text is no list of CPUs.
        """
        return _options.parse_list("ipexrun", txt)

    # -- for the sub-classes -------------------------------------------------------------------------------------------

    def base_environment(self) -> dict[str, str]:
        """Return the environment of all instances."""
        environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        if self.ld_preload:
            environment["LD_PRELOAD"] = ":".join(self.ld_preload)
        return environment | self.environ_set

    def program(self, args: argparse.Namespace) -> list[str]:
        """Return the command that the user wants to run, with its interpreter."""
        command = [] if args.no_python else [sys.executable, "-u"]
        if args.auto_ipex:
            command += ["-m", "ipex_runtime.codeless", *_options.codeless_options(args)]
        elif args.convert_fp64_to_fp32:
            command += ["-m", "ipex_runtime.launch._fp32"]
        if args.module:
            command.append("-m")
        return [*command, args.program, *args.program_args]

    def instance(
        self, index: int, label: str, command: list[str], environment: dict[str, str], pool: CPUPool
    ) -> Instance:
        """Return an instance that is bound to the CPUs and NUMA nodes of a pool."""
        several = len({c.node for c in self.cpuinfo.pool_all}) > 1
        nodes = tuple(n for n in pool.nodes() if several and n in self.cpuinfo.memory_nodes)
        if len(nodes) > 1:
            self.verbose(
                "info",
                f"{label} spans the NUMA nodes {', '.join(map(str, nodes))} (--bind-numa-node keeps it in one)",
            )
        return Instance(index, label, command, environment, cpus=pool.cpus(), nodes=nodes)
