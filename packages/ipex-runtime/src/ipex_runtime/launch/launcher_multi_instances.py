# SPDX-License-Identifier: Apache-2.0
"""Runs one or several independent instances of a program, each on its own cores."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence

from ipex_runtime._errors import LaunchArgumentError
from ipex_runtime.launch import _options
from ipex_runtime.launch._report import execute, log_path
from ipex_runtime.launch._supervise import Instance
from ipex_runtime.launch.cpu_info import CPUPool
from ipex_runtime.launch.launcher_base import Launcher, names_library
from ipex_runtime.topology.types import format_cpu_list

__all__ = ["MultiInstancesLauncher"]

LATENCY_CORES = 4


class MultiInstancesLauncher(Launcher):
    """Launcher of single and several instances."""

    tm_supported = _options.TASK_MANAGERS

    def add_params(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this launcher to a parser."""
        _options.add_multi_instance(parser)

    def is_command_available(self, cmd: str) -> bool:
        """Return whether a program is found on the PATH."""
        return shutil.which(cmd) is not None

    def set_multi_task_manager(
        self, multi_task_manager: str = "auto", skip_list: Sequence[str] | None = None
    ) -> str:
        """Choose what binds instances to cores: ``"auto"`` (this launcher itself), or a program that was found."""
        if multi_task_manager.lower() == "auto":
            return "auto"
        chosen = self.set_lib_bin_from_list(
            multi_task_manager,
            {"numactl": ["numactl", "apt install numactl"], "taskset": ["taskset", ""]},
            "multi-task manager",
            self.tm_supported,
            self.is_command_available,
            skip_list,
            "ipexrun binds the instances itself.",
        )
        # Asked for a program that is not there: binding is what counts.
        return "auto" if chosen == "none" and multi_task_manager.lower() != "none" else chosen

    def execution_command_builder(
        self,
        args: argparse.Namespace,
        omp_runtime: str,
        task_mgr: str,
        environ: dict[str, str],
        cpu_pools: Sequence[CPUPool],
        index: int,
    ) -> Instance:
        """Return instance ``index``, bound to its pool, ready to be started."""
        if not 0 <= index < len(cpu_pools):
            raise LaunchArgumentError(
                f"execution_command_builder: index must be below {len(cpu_pools)}, got {index}"
            )
        pool = cpu_pools[index]
        cores, nodes = pool.get_pool_txt()["cores"], pool.get_pool_txt()["nodes"]
        environment = dict(environ)
        command = self.program(args)
        if task_mgr == "numactl":
            command = ["numactl", "-C", cores, "-m", nodes, *command]
        elif task_mgr == "taskset":
            command = ["taskset", "-c", cores, *command]
        elif task_mgr == "none" and omp_runtime == "default":
            environment["GOMP_CPU_AFFINITY"] = cores
            environment.pop("OMP_PROC_BIND", None)  # libgomp takes one of the two
        elif task_mgr == "none" and omp_runtime == "intel":
            environment["KMP_AFFINITY"] = f"granularity=fine,proclist=[{cores}],explicit"
        environment["OMP_NUM_THREADS"] = str(self.check_env("OMP_NUM_THREADS", len(pool)))
        instance = self.instance(index, f"instance {index}", command, environment, pool)
        if task_mgr in ("none", "numactl"):
            instance.nodes = ()
        if task_mgr == "none":
            instance.cpus = ()
        if args.log_dir:
            name = f"{args.log_file_prefix}_instance_{index}_cores_{cores.replace(',', '_')}"
            instance.log = log_path(args.log_dir, name)
        return instance

    def launch(self, args: argparse.Namespace) -> None:
        """Run the instances that the options ask for.

        Raises:
            LaunchArgumentError: Options that cannot be met.
            subprocess.CalledProcessError: An instance failed.
        """
        self._modes(args)
        for name in ("cores_list", "nodes_list", "instance_idx"):
            twice = _options.repeated(getattr(args, name))
            if twice:
                option = "--" + name.replace("_", "-")
                self.verbose("warning", f"{option} names {', '.join(twice)} twice; it counts once")
        self.cpuinfo.gen_pools_ondemand(
            ninstances=args.ninstances,
            ncores_per_instance=args.ncores_per_instance,
            use_logical_cores=args.use_logical_cores,
            use_e_cores=args.use_e_cores,
            bind_numa_node=args.bind_numa_node,
            nodes_list=self.parse_list_argument(args.nodes_list),
            cores_list=self.parse_list_argument(args.cores_list),
            strategy=args.strategy,
        )
        pools = self.cpuinfo.pools_ondemand
        args.ninstances = len(pools)
        wanted = self._wanted(args.instance_idx, len(pools))
        self.set_memory_allocator(args.memory_allocator, args.benchmark)
        omp_runtime, skip = self._omp_runtime(args, pools)
        task_manager = self.set_multi_task_manager(args.multi_task_manager, skip)
        environment = self.base_environment()
        instances = [
            self.execution_command_builder(args, omp_runtime, task_manager, environment, pools, i)
            for i in wanted
        ]
        execute(self, args, instances)

    def _modes(self, args: argparse.Namespace) -> None:
        if args.latency_mode and args.throughput_mode:
            raise LaunchArgumentError(
                "ipexrun: --latency-mode and --throughput-mode exclude each other, got both: remove one"
            )
        if not args.latency_mode and not args.throughput_mode:
            return
        mode = "--latency-mode" if args.latency_mode else "--throughput-mode"
        overridden = {
            "--ninstances": args.ninstances > 0,
            "--ncores-per-instance": args.ncores_per_instance > 0,
            "--use-logical-cores": args.use_logical_cores,
        }
        ignored = [name for name, given in overridden.items() if given]
        if ignored:
            self.verbose("warning", f"{mode} decides by itself: {', '.join(ignored)} has no effect")
        args.use_logical_cores = False
        if args.latency_mode:
            args.ninstances, args.ncores_per_instance = 0, LATENCY_CORES
            cores = len({c.core for c in self.cpuinfo.pool_all})
            if cores < LATENCY_CORES:
                self.verbose(
                    "warning", f"{mode} wants {LATENCY_CORES} cores per instance; there are {cores}"
                )
                args.ncores_per_instance = 0
            return
        nodes = self.parse_list_argument(args.nodes_list)
        cpus = set(self.parse_list_argument(args.cores_list))
        there = {c.node for c in self.cpuinfo.pool_all if not cpus or c.cpu in cpus}
        args.ninstances = len(there & set(nodes) if nodes and not cpus else there)
        args.ncores_per_instance, args.bind_numa_node = 0, True

    def _wanted(self, text: str, count: int) -> list[int]:
        if text.strip() in ("", "-1"):
            return list(range(count))
        wanted = self.parse_list_argument(text)
        if wrong := [i for i in wanted if i >= count]:
            raise LaunchArgumentError(
                f"ipexrun: --instance-idx must be below {count}, the number of instances, got {format_cpu_list(wrong)}"
            )
        return wanted

    def _omp_runtime(
        self, args: argparse.Namespace, pools: Sequence[CPUPool]
    ) -> tuple[str, list[str]]:
        preloaded = any(names_library(entry, "iomp5") for entry in self.ld_preload)
        given = "KMP_AFFINITY" in os.environ
        whole = args.use_logical_cores and len({c.cpu for p in pools for c in p}) == len(
            self.cpuinfo.pool_all
        )
        if whole and given:
            raise LaunchArgumentError(
                "ipexrun: KMP_AFFINITY must not be set where all CPUs with all hardware threads are used, "
                f"got {os.environ['KMP_AFFINITY']!r}"
            )
        # With all CPUs in use that setting would keep threads off the second hardware threads.
        chosen = self.set_omp_runtime(args.omp_runtime, set_kmp_affinity=not whole)
        return chosen, ["numactl"] if preloaded and given else []
