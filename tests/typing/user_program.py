# SPDX-License-Identifier: Apache-2.0
"""What users write, for type checkers: `nox -s typecheck` runs pyright on it, strictly. It is never executed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from typing_extensions import assert_type

import intel_extension_for_pytorch
import intel_extension_for_pytorch.quantization
import ipex
import ipex.cpu.runtime
import ipex.llm
import ipex.llm.functional
import ipex.quantization
import ipex.runtime
import ipex_core.distributed
import ipex_llm
import ipex_llm.engine
import ipex_llm.modules
import ipex_quant
import ipex_runtime
import ipex_xpu_kernels


def inference(model: nn.Module, x: torch.Tensor) -> None:
    fast = ipex.optimize(model.eval(), dtype=torch.bfloat16, sample_input=x)
    print(ipex.explain(fast))
    ipex.restore(fast)
    print(ipex.op_info("rms_norm")["schema"], ipex.show_config())
    ipex.set_fp32_math_mode(ipex.FP32MathMode.BF32, device="cpu")
    with ipex.verbose(ipex.VERBOSE_ON):
        fast(x)
    ipex.enable_onednn_fusion(True)
    ipex.export(fast, x, Path("model.pt2"))
    print(ipex.doctor().torch)


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pair = ipex.optimize(model.train(), optimizer=optimizer, dtype=torch.bfloat16)
    print(pair)


def old_name(model: nn.Module) -> None:
    intel_extension_for_pytorch.optimize(model.eval())
    intel_extension_for_pytorch.llm.optimize(model, dtype=torch.bfloat16)
    prepared = intel_extension_for_pytorch.quantization.prepare(
        model, intel_extension_for_pytorch.quantization.default_dynamic_qconfig_mapping
    )
    intel_extension_for_pytorch.quantization.convert(prepared)


def language_model(model: nn.Module, ids: torch.Tensor) -> None:
    fast = ipex_llm.optimize(model, dtype=torch.bfloat16)
    print(fast(ids))
    h = ipex.llm.functional.rms_norm(ids, ids, 1e-6)
    print(h, ipex_llm.modules.RMSNorm(64))
    engine = ipex_llm.engine.Engine(fast)
    print(engine)


def quantization(model: nn.Module, x: torch.Tensor) -> None:
    prepared = ipex_quant.prepare(model, ipex_quant.default_static_qconfig_mapping, x)
    prepared(x)
    ipex_quant.convert(prepared)
    config = ipex_quant.get_weight_only_quant_qconfig_mapping(
        weight_dtype=ipex_quant.WoqWeightDtype.INT4
    )
    converted = ipex.quantization.convert(ipex.quantization.prepare(model, config))
    names = ipex_quant.save(converted, "folder")
    assert_type(names, tuple[str, ...])
    assert_type(ipex_quant.load("folder", model), nn.Module)


def cores(model: nn.Module, x: torch.Tensor) -> None:
    pool = ipex_runtime.CPUPool(node_id=0)
    task = ipex_runtime.Task(model, pool)
    future = task(x)
    print(future.get())
    with ipex_runtime.pin(pool):
        model(x)
    streams = ipex.cpu.runtime.MultiStreamModule(model, num_streams=2, cpu_pool=pool)
    print(streams(x), ipex.runtime.get_core_list_of_node_id(0))


def other_devices() -> None:
    print(ipex_xpu_kernels.__version__, ipex.xpu.is_available())
    print(ipex_core.distributed.shared_group())
