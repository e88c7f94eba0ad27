# SPDX-License-Identifier: Apache-2.0
"""Names that scripts look up in the native module of Intel Extension for PyTorch, answered from the loaded kernels.

Levels are written as there, in capitals (``"AVX512_BF16"``). Without a kernel package the ops run their reference:
current and highest built level are then ``"DEFAULT"``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ipex.compat import migration
from ipex_core import config
from ipex_core.config import FP32MathMode, get_fp32_math_mode, set_fp32_math_mode
from ipex_core.kernels import machine, providers

if TYPE_CHECKING:
    import torch

    from ipex_runtime import CPUPool

__all__ = [
    "FP32MathMode",
    "disable_jit_concat_linear",
    "disable_jit_linear_repack",
    "disable_jit_opt",
    "enable_jit_concat_linear",
    "enable_jit_linear_repack",
    "enable_jit_opt",
    "get_current_cpu_pool",
    "get_fp32_math_mode",
    "get_jit_concat_linear",
    "get_jit_linear_repack",
    "get_jit_opt",
    "isa_has_amx_fp16_support",
    "onednn_has_bf16_support",
    "onednn_has_fp16_support",
    "onednn_has_fp8_support",
    "roc_auc_score",
    "roc_auc_score_all",
    "set_cpu_pool",
    "set_fp32_math_mode",
]


def _cpu_levels() -> tuple[str, ...]:
    """Return the levels this CPU can run, lowest first.

    Those the kernels were built for by their own check, the others from procfs: a build may leave levels out.
    """
    provider = providers.provider_for("cpu")
    built = () if provider is None else provider.isa_built
    able = () if provider is None else provider.isa_available
    features = set(machine.cpu_info().features)
    return tuple(
        n
        for n in config.ISA_LEVELS
        if (n in able if n in built else features.issuperset(config.LEVEL_FEATURES[n]))
    )


def _get_current_isa_level() -> str:
    """Return the level in use."""
    return _current().upper()


def _current() -> str:
    return providers.cpu_level() or "default"


def _get_highest_cpu_support_isa_level() -> str:
    """Return the highest level this CPU can run."""
    return _cpu_levels()[-1].upper()


def _get_highest_binary_support_isa_level() -> str:
    """Return the highest level the installed kernels were built for."""
    provider = providers.provider_for("cpu")
    return provider.isa_built[-1].upper() if provider is not None else "DEFAULT"


#: The highest level without tiles, which oneDNN's names for float16 do not include.
_NO_TILES = [n for n in config.ISA_LEVELS if "amx_tile" not in config.LEVEL_FEATURES[n]][-1]
#: What ``ONEDNN_MAX_CPU_ISA`` can say -> the highest level within it; what is not here limits nothing that we have.
_ONEDNN_LIMITS = {
    **dict.fromkeys(("sse41", "avx"), config.ISA_LEVELS[0]),
    **{n.replace("avx512", "avx512_core"): n for n in config.ISA_LEVELS if n.startswith("avx")},
    "avx2_vnni_2": "avx2_vnni",
    **dict.fromkeys(("avx512_core_fp16", "avx10_1_512"), _NO_TILES),
}


def _get_current_onednn_isa_level() -> str:
    """Return the level that torch's oneDNN computes at: the highest of this CPU, or the limit in its environment.

    ``IPEX_CPU_ISA`` is about our kernels and does not limit it.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    highest = _ONEDNN_LIMITS.get(limit.lower(), config.ISA_LEVELS[-1])
    within = config.ISA_LEVELS[: config.ISA_LEVELS.index(highest) + 1]
    return [level for level in _cpu_levels() if level in within][-1].upper()


def _check_not_sync_onednn_isa_level() -> bool:
    """Return whether our kernels and torch's oneDNN compute at different levels."""
    return _get_current_isa_level() != _get_current_onednn_isa_level()


def _is_syngraph_available() -> bool:
    """Return False: no graph compiler for Gaudi is built in."""
    return False


def _is_ds_kernel_enabled() -> bool:
    """Return False: DeepSpeed's kernels are in DeepSpeed."""
    return False


def _is_bnb_kernel_enabled() -> bool:
    """Return False: the kernels of bitsandbytes are in bitsandbytes."""
    return False


def _has_cpu() -> bool:
    """Return whether CPU kernels are loaded."""
    return providers.provider_for("cpu") is not None


def _has_xpu() -> bool:
    """Return whether there is an xpu device, of torch itself or of ipex-xpu-kernels."""
    import torch

    providers.load_providers()
    return bool(getattr(torch._C, "_has_xpu", False))


def _question(level: str) -> Callable[[], bool]:
    def ask() -> bool:
        return level in _cpu_levels()

    ask.__name__ = ask.__qualname__ = f"isa_has_{level}_support"
    ask.__doc__ = f"Return whether the level {level} can run here."
    return ask


# ``isa_has_LEVEL_support`` for each level but the lowest, which runs anywhere.
_QUESTIONS = {f"isa_has_{level}_support": _question(level) for level in config.ISA_LEVELS[1:]}
globals().update(_QUESTIONS)
__all__ += list(_QUESTIONS)


def isa_has_amx_fp16_support() -> bool:
    """Return whether the CPU multiplies tiles of float16; no kernel here needs it."""
    return "amx_fp16" in machine.cpu_info().features


def get_current_cpu_pool() -> CPUPool:
    """Return the CPUs that the calling thread may use, as a pool."""
    from ipex_runtime import CPUPool

    return CPUPool()


def set_cpu_pool(cpu_pool: CPUPool) -> None:
    """Let the calling thread use the CPUs of a pool; the threads of OpenMP stay where they are.

    `ipex.runtime.pin` moves them too, and goes back by itself.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpu_pool.get_core_list())


def onednn_has_bf16_support() -> bool:
    """Return whether oneDNN computes bfloat16 on this CPU."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def onednn_has_fp16_support() -> bool:
    """Return whether oneDNN computes float16 on this CPU."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def onednn_has_fp8_support() -> bool:
    """Return True: `ipex.quantization.fp8` runs on any CPU, and scripts ask this before they use it.

    oneDNN has instructions for float8 where `isa_has_amx_fp16_support` is true.
    """
    return True


def roc_auc_score(actual: torch.Tensor, predicted: torch.Tensor) -> list[float]:
    """Return the area under the ROC curve and two zeros, as IPEX does; see `ipex_core.metrics.roc_auc_score`."""
    from ipex_core import metrics

    return [metrics.roc_auc_score(actual, predicted), 0.0, 0.0]


def roc_auc_score_all(actual: torch.Tensor, predicted: torch.Tensor) -> list[float]:
    """Return the area under the ROC curve, the log loss and the accuracy."""
    from ipex_core import metrics

    return [
        metrics.roc_auc_score(actual, predicted),
        metrics.log_loss(actual, predicted),
        metrics.accuracy_score(actual, predicted),
    ]


# --- switches of the TorchScript pass ---------------------------------------------------------------------------------

_SWITCHES = {"linear_repack": True, "concat_linear": True}


def enable_jit_opt() -> None:
    """Let `ipex.jit.fuse` rewrite programs; as ``ipex.enable_onednn_fusion(True)``."""
    from ipex_core import jit

    jit.enable_onednn_fusion(True)


def disable_jit_opt() -> None:
    """Let `ipex.jit.fuse` return programs as they are; as ``ipex.enable_onednn_fusion(False)``."""
    from ipex_core import jit

    jit.enable_onednn_fusion(False)


def get_jit_opt() -> bool:
    """Return whether `ipex.jit.fuse` rewrites programs."""
    from ipex_core import jit

    return jit.is_onednn_fusion_enabled()


def enable_jit_linear_repack() -> None:
    """Remember the switch, which decides nothing: a layer that `ipex.optimize` has packed is never packed again."""
    _SWITCHES["linear_repack"] = True


def disable_jit_linear_repack() -> None:
    """Remember the switch, which decides nothing: a layer that `ipex.optimize` has packed is never packed again."""
    _SWITCHES["linear_repack"] = False


def get_jit_linear_repack() -> bool:
    """Return what was remembered."""
    return _SWITCHES["linear_repack"]


def enable_jit_concat_linear() -> None:
    """Remember the switch, which decides nothing: ``ipex.optimize(concat_linear=...)`` does."""
    _SWITCHES["concat_linear"] = True


def disable_jit_concat_linear() -> None:
    """Remember the switch, which decides nothing: ``ipex.optimize(concat_linear=...)`` does."""
    _SWITCHES["concat_linear"] = False


def get_jit_concat_linear() -> bool:
    """Return what was remembered."""
    return _SWITCHES["concat_linear"]


migration.teach(sys.modules[__name__], "_C")
