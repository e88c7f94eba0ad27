# SPDX-License-Identifier: Apache-2.0
"""Runs the ranks of a distributed program.

Each rank gets the variables that ``torchrun`` sets, so ``torch.distributed.init_process_group()`` finds the others by
its usual rendezvous (``env://``). With several machines the launcher runs on each of them. With MPI, ``mpiexec.hydra``
starts the ranks on all machines.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ipex_runtime._errors import LaunchArgumentError
from ipex_runtime.launch import _options
from ipex_runtime.launch._report import execute, log_path
from ipex_runtime.launch._supervise import Instance
from ipex_runtime.launch.cpu_info import CPUPool
from ipex_runtime.launch.launcher_base import Launcher

__all__ = ["DistributedTrainingLauncher"]

ONECCL = "oneccl_bindings_for_pytorch"
SSH_SECONDS = 20


class DistributedTrainingLauncher(Launcher):
    """Launcher of ranks that work together."""

    def add_params(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this launcher to a parser."""
        _options.add_distributed(parser)

    def get_pin_domain_affinity(
        self,
        cpu_pools: Sequence[CPUPool],
        ccl_worker_count: int,
        logical_cores_for_ccl: bool = False,
    ) -> dict[str, str]:
        """Divide the CPUs of each rank between computation and the workers of oneCCL.

        Args:
            cpu_pools: The CPUs of each rank of this machine.
            ccl_worker_count: Workers of each rank; they get its first cores.
            logical_cores_for_ccl: The workers get second hardware threads instead, if each rank has enough.

        Returns:
            ``"pin_domain"``: a mask of the CPUs for computation of each rank, as in ``I_MPI_PIN_DOMAIN``;
            ``"affinity"``: the CPUs of all workers, as in ``CCL_WORKER_AFFINITY``.

        Raises:
            LaunchArgumentError: A rank has no more cores than workers.
        """
        compute, workers = self._divide(cpu_pools, ccl_worker_count, logical_cores_for_ccl)
        masks = [hex(sum(1 << cpu for cpu in cpus)) for cpus in compute]
        return {
            "pin_domain": f"[{','.join(masks)}]",
            "affinity": ",".join(str(cpu) for cpus in workers for cpu in cpus),
        }

    def _divide(
        self, pools: Sequence[CPUPool], workers: int, logical: bool
    ) -> tuple[list[list[int]], list[list[int]]]:
        if logical and any(sum(not c.is_physical_core for c in pool) < workers for pool in pools):
            self.verbose(
                "warning",
                f"--logical-cores-for-ccl needs {workers} second hardware threads per rank; "
                "physical cores are used",
            )
            logical = False
        compute, busy = [], []
        for pool in pools:
            physical = [c.cpu for c in pool if c.is_physical_core]
            if logical:
                busy.append([c.cpu for c in pool if not c.is_physical_core][:workers])
                compute.append(physical)
            else:
                if workers >= len(physical):
                    raise LaunchArgumentError(
                        "get_pin_domain_affinity: --ccl-worker-count must be below the number of cores of a rank, "
                        f"{len(physical)}, got {workers}"
                    )
                busy.append(physical[:workers])
                compute.append(physical[workers:])
        return compute, busy

    def launch(self, args: argparse.Namespace) -> None:
        """Run the ranks of this machine, or with MPI all of them.

        Raises:
            LaunchArgumentError: Options that cannot be met.
            subprocess.CalledProcessError: A rank failed.
        """
        mpi = args.distributed_launcher == "mpi" or bool(args.extra_mpi_params)
        self._check(args, mpi)
        hosts = self._hosts(args)
        ccl = importlib.util.find_spec(ONECCL) is not None
        workers = args.ccl_worker_count if ccl or hasattr(args, "ccl_worker_count_given") else 0
        self._make_pools(args, workers)
        pools = self.cpuinfo.pools_ondemand
        compute, _ = self._divide(pools, workers, args.logical_cores_for_ccl)
        self.set_memory_allocator(args.memory_allocator, False, ["jemalloc"])
        self.set_omp_runtime(args.omp_runtime)
        self.add_env("OMP_NUM_THREADS", str(min(map(len, compute))))
        if hosts:
            args.master_addr = hosts[0]
        self.add_env("MASTER_ADDR", args.master_addr)
        self.add_env("MASTER_PORT", str(self._port(args)))
        if workers or mpi:
            pinned = self.get_pin_domain_affinity(pools, workers, args.logical_cores_for_ccl)
            if mpi:
                self.add_env("I_MPI_PIN_DOMAIN", pinned["pin_domain"])
            self.add_env("CCL_WORKER_COUNT", str(max(1, workers)))
            if workers:
                self.add_env("CCL_WORKER_AFFINITY", pinned["affinity"])
        if mpi:
            self._run_mpi(args)
        else:
            self._run_ranks(args, compute, ccl)

    # -- arguments -----------------------------------------------------------------------------------------------------

    def _check(self, args: argparse.Namespace, mpi: bool) -> None:
        if args.logical_cores_for_ccl and args.use_logical_cores:
            raise LaunchArgumentError(
                "ipexrun: --logical-cores-for-ccl and --use-logical-cores exclude each other, got both: remove one"
            )
        for name, least in (("nnodes", 1), ("nprocs_per_node", 0), ("ccl_worker_count", 0)):
            value = getattr(args, name)
            if not least <= value <= 1 << 16:
                option = "--" + name.replace("_", "-")
                raise LaunchArgumentError(
                    f"ipexrun: {option} must be {least} to {1 << 16}, got {value}"
                )
        if not 0 <= args.master_port < 1 << 16:
            raise LaunchArgumentError(
                f"ipexrun: --master-port must be 0 to 65535, got {args.master_port}"
            )
        if mpi and shutil.which("mpiexec.hydra") is None and not args.dry_run:
            raise LaunchArgumentError(
                "ipexrun: --distributed-launcher mpi needs mpiexec.hydra (Intel MPI, MPICH) on the PATH, got none;"
                " without the option and --extra-mpi-params no MPI is needed"
            )

    def _hosts(self, args: argparse.Namespace) -> list[str]:
        if args.nnodes == 1:
            return []
        path = Path(args.hostfile)
        mpi = args.distributed_launcher == "mpi" or bool(args.extra_mpi_params)
        try:
            lines = [line.split("#")[0].strip() for line in path.read_text("utf-8").splitlines()]
        except OSError as error:
            if not mpi and args.node_rank >= 0 and args.master_addr != "127.0.0.1":
                return []  # everything was said without the file
            raise LaunchArgumentError(
                f"ipexrun: --nnodes {args.nnodes} needs a --hostfile with the address of each machine (or --node-rank "
                f"and --master-addr on each), got {args.hostfile!r}: {error.strerror}"
            ) from error
        hosts = [line.split()[0] for line in lines if line]
        if len(hosts) < args.nnodes:
            raise LaunchArgumentError(
                f"ipexrun: --hostfile must have {args.nnodes} addresses (--nnodes), got {len(hosts)}"
            )
        own = _own_addresses()
        mine = [i for i, host in enumerate(hosts[: args.nnodes]) if _addresses(host) & own]
        if mpi:
            if 0 not in mine:
                raise LaunchArgumentError(
                    f"ipexrun: the first address of --hostfile must be this machine's, got {hosts[0]!r}"
                )
            if not args.dry_run:
                self._check_ssh(hosts[1 : args.nnodes])
        elif args.node_rank < 0:
            if not mine:
                raise LaunchArgumentError(
                    f"ipexrun: --hostfile must have an address of this machine (or give --node-rank), got {hosts}"
                )
            args.node_rank = mine[0]
        return hosts

    def _check_ssh(self, hosts: Sequence[str]) -> None:
        for host in hosts:
            command = [
                "ssh",
                "-o",
                "BatchMode=yes",
                "-o",
                f"ConnectTimeout={SSH_SECONDS}",
                "--",
                host,
                "true",
            ]
            try:
                code = subprocess.run(
                    command, check=False, stdin=subprocess.DEVNULL, timeout=2 * SSH_SECONDS
                ).returncode
            except (OSError, subprocess.TimeoutExpired) as error:
                raise LaunchArgumentError(
                    f"ipexrun: ssh to {host} must work without a password, got {error}"
                ) from error
            if code:
                raise LaunchArgumentError(
                    f"ipexrun: ssh to {host} must work without a password, got exit code {code}"
                )

    def _make_pools(self, args: argparse.Namespace, workers: int) -> None:
        nodes = self.parse_list_argument(args.nodes_list)
        every = self.cpuinfo.pool_all
        if args.nprocs_per_node == 0:
            args.nprocs_per_node = len(nodes) if nodes else len({c.node for c in every})
        cores = args.ncores_per_instance
        logical = args.logical_cores_for_ccl or args.use_logical_cores
        if cores > 0 and not args.logical_cores_for_ccl:
            cores += workers
        if cores > 0 and logical:
            # A pool counts hardware threads.
            cores *= max(1, len(every) // len({c.core for c in every}))
        self.cpuinfo.gen_pools_ondemand(
            ninstances=args.nprocs_per_node,
            ncores_per_instance=cores,
            use_logical_cores=logical,
            use_e_cores=args.use_e_cores,
            nodes_list=nodes,
            cores_list=self.parse_list_argument(args.cores_list),
            strategy=args.strategy,
            bind_numa_node=args.bind_numa_node,
        )

    def _port(self, args: argparse.Namespace) -> int:
        if args.nnodes > 1:
            if args.master_port == 0:
                raise LaunchArgumentError(
                    "ipexrun: --master-port must be given with several machines, got 0"
                )
            return int(args.master_port)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", args.master_port))
            except OSError as error:
                raise LaunchArgumentError(
                    f"ipexrun: --master-port must be a free port, got {args.master_port}: {error.strerror} "
                    "(0 takes a free one)"
                ) from error
            return int(probe.getsockname()[1])

    # -- without MPI ---------------------------------------------------------------------------------------------------

    def _run_ranks(
        self,
        args: argparse.Namespace,
        compute: Sequence[list[int]],
        ccl: bool,
    ) -> None:
        node = max(0, args.node_rank)
        if node >= args.nnodes:
            raise LaunchArgumentError(
                f"ipexrun: --node-rank must be below --nnodes, {args.nnodes}, got {args.node_rank}"
            )
        local = args.nprocs_per_node
        base = self.base_environment()
        instances = []
        for i, (pool, cpus) in enumerate(zip(self.cpuinfo.pools_ondemand, compute, strict=True)):
            rank = node * local + i
            environment = base | torchrun_variables(rank, i, local, node, args.nnodes)
            if ccl:
                own = {
                    "CCL_PROCESS_LAUNCHER": "none",
                    "CCL_LOCAL_RANK": str(i),
                    "CCL_LOCAL_SIZE": str(local),
                }
                environment = own | environment
            # The pool is narrowed to the CPUs for computation; oneCCL binds its workers by itself.
            narrowed = CPUPool([c for c in pool if c.cpu in cpus or args.use_logical_cores])
            instance = self.instance(
                rank, f"rank {rank}", self.program(args), environment, narrowed
            )
            if args.log_dir:
                instance.log = log_path(args.log_dir, f"{args.log_file_prefix}_rank_{rank}")
            instances.append(instance)
        combined = log_path(args.log_dir, args.log_file_prefix) if args.log_dir else None
        execute(self, args, instances, combined, prefixed=bool(args.log_dir))

    # -- with MPI ------------------------------------------------------------------------------------------------------

    def _run_mpi(self, args: argparse.Namespace) -> None:
        ranks = args.nnodes * args.nprocs_per_node
        command = ["mpiexec.hydra", "-l", "-np", str(ranks), "-ppn", str(args.nprocs_per_node)]
        for name, value in self.environ_set.items():
            command += ["-genv", name, value]
        try:
            command += shlex.split(args.extra_mpi_params)
        except ValueError as error:
            raise LaunchArgumentError(
                f"ipexrun: --extra-mpi-params must be words for a shell, got {args.extra_mpi_params!r}: {error}"
            ) from error
        if args.nnodes > 1:
            command += ["-hostfile", args.hostfile]
        instance = Instance(
            0, "mpiexec.hydra", [*command, *self.program(args)], self.base_environment()
        )
        if args.log_dir:
            instance.log = log_path(args.log_dir, args.log_file_prefix)
        try:
            execute(self, args, [instance])
        finally:
            if instance.log is not None and instance.log.exists():
                split_ranks(instance.log, ranks)


def torchrun_variables(
    rank: int, local_rank: int, local_size: int, node: int, nodes: int
) -> dict[str, str]:
    """Return the variables that ``torchrun`` sets for a rank, but for the address of the rendezvous."""
    world = nodes * local_size
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "none",
        # Rank 0 itself is the meeting point; there is no agent that would be.
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    return {name: str(value) for name, value in values.items()}


def split_ranks(log: Path, ranks: int) -> None:
    """Write the lines ``[<rank>] text`` of a log to one file for each rank, ``<log>_rank_<rank>.log``."""
    texts: dict[int, list[bytes]] = {rank: [] for rank in range(ranks)}
    for line in log.read_bytes().splitlines(keepends=True):
        match = re.match(rb"\[(\d+)\] ?", line)
        if match and int(match.group(1)) in texts:
            texts[int(match.group(1))].append(line[match.end() :])
    for rank, lines in texts.items():
        log.with_name(f"{log.stem}_rank_{rank}.log").write_bytes(b"".join(lines))


def _own_addresses() -> set[str]:
    import psutil

    found = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    return found | {socket.gethostname()}


def _addresses(host: str) -> set[str]:
    try:
        return {host} | {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}
