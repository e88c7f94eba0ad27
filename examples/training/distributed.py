# SPDX-License-Identifier: Apache-2.0
"""Train on several processes, with DistributedDataParallel or FSDP2.

torchrun --nproc-per-node 2 distributed.py --mode ddp
"""

from __future__ import annotations

import datetime
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from session import DTYPES, Session, parser
from torch import nn

import ipex

Tensor = torch.Tensor


class Whole:
    """The model and the optimizer as a stock, whole checkpoint, whatever they are wrapped in."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return whole tensors; every process must call it."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take whole tensors; every process must call it."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )


def prepare(mode: str, model: nn.Module, dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
    """Return the model and its optimizer, ready for several processes."""
    if mode == "ddp":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=dtype, inplace=True)
        return nn.parallel.DistributedDataParallel(model), optimizer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)
    for layer in (*(m for m in model if isinstance(m, nn.Linear)), model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # FSDP has the float32 weights and casts them: optimize only makes the steps fast.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return ipex.optimize(model, optimizer=optimizer, inplace=True)


def main() -> None:
    """Run the example."""
    options = parser(__doc__)
    options.add_argument("--mode", choices=["ddp", "fsdp"], default="ddp")
    args = options.parse_args()
    if "RANK" not in os.environ:
        options.exit(2, "error: start it with torchrun --nproc-per-node 2\n")
    # A rank that is lost is noticed after a minute at the latest, not after half an hour.
    ipex.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)  # the same weights in all processes
    dtype = DTYPES[args.dtype]
    model = nn.Sequential(
        nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 8)
    )
    model, optimizer = prepare(args.mode, model.train(), dtype)
    centers = torch.randn(8, 32)

    def step(number: int) -> float:
        chance = torch.Generator().manual_seed(number)
        labels = torch.randint(8, (args.batch * ranks,), generator=chance)
        x = centers[labels] + torch.randn(labels.shape[0], 32, generator=chance)
        own = slice(rank * args.batch, (rank + 1) * args.batch)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
            logits = model(x[own]).float()
        loss = nn.functional.cross_entropy(logits, labels[own])
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        ipex.distributed.all_reduce(mean)
        return float(mean) / ranks

    session = Session(args, {"whole": Whole(model, optimizer)}, args.mode, main=rank == 0)
    losses = session.run(step)
    session.report(steps=len(losses), loss=losses[-1], ranks=ranks)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        # Of a rank that is gone the backend tells no more than that a connection was closed.
        if dist.is_initialized():
            print(
                f"rank {dist.get_rank()} of {dist.get_world_size()}: {error}",
                file=sys.stderr,
                flush=True,
            )
        raise
