# SPDX-License-Identifier: Apache-2.0
"""The table of names of Intel Extension for PyTorch, against the code."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import torch

import ipex
from ipex.compat import migration
from ipex.compat.torch_ops import alias_names
from ipex_cli import migration_table
from ipex_core.errors import (
    MissingComponentError,
    NotOfferedError,
    NotOfferedModuleError,
    NotOfferedNameError,
)

OLD = "intel_extension_for_pytorch"
OPS = "torch.ops."
ROWS = migration_table.rows()

#: First words of names -> the package they live in, where it is not always installed.
NEEDS = {
    "llm": "ipex_llm",
    "transformers": "ipex_llm",
    "optimize_transformers": "ipex_llm",
    "quantization": "ipex_quant",
    "_isa_help": "ipex_quant",
    "cpu": "ipex_runtime",
    "launcher": "ipex_runtime",
    "_C": "ipex_runtime",
    "nn": "ipex_quant",
    "cmake_prefix_path": "ipex_cpu_kernels",
}


def skip_without(name: str) -> None:
    package = NEEDS.get(name.split(".")[0], "ipex")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def groups() -> dict[str, list[migration_table.Row]]:
    """Return the rows by what stands before their last dot."""
    found: dict[str, list[migration_table.Row]] = {}
    for row in ROWS.values():
        found.setdefault(row.name.rpartition(".")[0], []).append(row)
    return found


def old(name: str) -> str:
    return name if name.startswith(OPS) else f"{OLD}.{name}"


def test_no_row_is_unknown() -> None:
    assert len(ROWS) > 900
    for row in ROWS.values():
        assert row.state in migration_table.STATES, row
        assert row.here, row
        assert row.note or row.state != "differs", row
        assert "|" not in row.here + row.note, row


@pytest.mark.parametrize("module", sorted(groups()))
def test_rows_are_true(module: str) -> None:
    skip_without(module or "ipex")
    for row in groups()[module]:
        has_xpu = importlib.util.find_spec("ipex_xpu_kernels") is not None
        if row.state == "absent" or (row.state == "xpu" and not has_xpu):
            check_absent(row)
            continue
        if row.state == "xpu":
            assert migration.resolve(old(row.name)) is not None, row
            continue
        if NEEDS.get(row.name) and importlib.util.find_spec(NEEDS[row.name]) is None:
            continue
        try:
            found = migration.resolve(old(row.name))
        except MissingComponentError:
            continue  # it is offered by a package that is not installed
        assert found is not None, row
        if has_xpu and str(getattr(found, "__module__", "")).startswith("ipex_xpu_kernels"):
            continue  # the row tells what it is without that package
        here = migration.resolve(row.here)
        assert found is here or found == here, row


def check_absent(row: migration_table.Row) -> None:
    if row.name.startswith(OPS):
        space, _, name = row.name.rpartition(".")
        assert name == "*" or not hasattr(migration.resolve(space), name), row
        return
    module, _, name = row.name.rpartition(".")
    name = "anything" if name == "*" else name
    parent = migration.resolve(f"{OLD}.{module}" if module else OLD)
    alternative = re.escape(row.here)
    with pytest.raises(NotImplementedError, match=alternative) as caught:
        getattr(parent, name)
    assert isinstance(caught.value, NotOfferedNameError)
    assert not hasattr(parent, name), row


def test_names_of_ours_in_the_alternatives_exist() -> None:
    for row in ROWS.values():
        for text in re.findall(
            r"`((?:ipex|torch)\.[\w.]+)", row.here if row.state in ("absent", "xpu") else ""
        ):
            words = text.split(".")
            if words[:2] == ["ipex", "xpu"] or words[1] in ("xpu", "runtime"):
                continue
            if words[0] == "ipex" and len(words) > 1:
                package = NEEDS.get(words[1])
                if package is not None and importlib.util.find_spec(package) is None:
                    continue
            assert migration.resolve(text) is not None, row


@pytest.mark.parametrize(
    "module",
    [
        "",
        "_C",
        "distributed",
        "llm",
        "llm.functional",
        "llm.generation",
        "llm.modules",
        "llm.quantization",
        "llm.utils",
        "nn.functional",
        "nn.modules",
        "nn.modules.merged_embeddingbag",
        "optim",
        "quantization",
        "quantization.fp8",
        "cpu.runtime",
        "cpu.tpp.optim",
    ],
)
def test_no_public_name_is_missing(module: str) -> None:
    skip_without(module or "ipex")
    names = migration.resolve(f"ipex.{module}" if module else "ipex").__all__
    rows = {row for row in names if migration_table.find(f"{module}.{row}" if module else row)}
    modules = {name for name in names if _is_module(f"ipex.{module}.{name}".replace("..", "."))}
    assert sorted(set(names) - rows - modules - {"__version__"}) == []


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def test_every_op_has_a_row() -> None:
    names = set()
    for name in alias_names():
        space, _, op = name.partition("::")
        names.add(f"{OPS}{space}.{op.partition('.')[0]}")
    offered = {n for n, row in ROWS.items() if n.startswith(OPS) and row.state != "absent"}
    # IPEX's namespace `ipex` is ours, too: one of its names is an op here.
    assert names == offered - {f"{OPS}ipex.softmax"}


# --- how the names come in ------------------------------------------------------------------------------------------


def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.torch_ipex.rmsnorm(x, torch.ones(4), 1e-5)


def test_ops_that_are_not_offered() -> None:
    ops = torch.ops.torch_ipex
    assert not hasattr(ops, "decode_attention") and not hasattr(ops, "no_such_op")
    with pytest.raises(NotImplementedError, match=r"torch\.ops\.ipex\.decode_attention"):
        ops.decode_attention  # noqa: B018
    with pytest.raises(NotImplementedError, match=r"ipex\.optimize"):
        torch.ops.ipex_prepack.deconvolution_prepack  # noqa: B018
    with pytest.raises(AttributeError, match="no_such_op") as other:
        ops.no_such_op  # noqa: B018
    assert not isinstance(other.value, NotImplementedError)
    # TorchScript and dynamo still see a namespace of ops.
    x = torch.randn(2, 4)
    for run in (torch.jit.script(scripted), torch.compile(scripted, backend="eager")):
        torch.testing.assert_close(run(x), scripted(x))


def test_calls_as_the_xpu_build_has_them() -> None:
    skip_without("llm")
    intrinsic = migration.resolve(f"{OLD}.xpu.intrinsic")
    q, k, v = torch.randn(3, 5, 4, 16)
    out, starts = torch.zeros_like(q), torch.tensor([0, 2, 5])
    got = intrinsic.varlen_fwd(
        *(q, k, v, out, starts, starts, 3, 3, 0.0, 0.25, False, True, False, None)
    )
    for a, b in ((0, 2), (2, 5)):
        rows = (x[a:b].transpose(0, 1) for x in (q, k, v))
        want = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, scale=0.25)
        torch.testing.assert_close(got[a:b], want.transpose(0, 1))
    caches = torch.zeros(2, 3, 4, 8, 16)
    intrinsic.reshape_and_cache(k, v, *caches, slots=torch.arange(8, 13))
    torch.testing.assert_close(caches[0, 1, :, :5], k.transpose(0, 1))


def test_forms_of_import() -> None:
    from intel_extension_for_pytorch.frontend import optimize
    from intel_extension_for_pytorch.xpu.memory import empty_cache

    assert optimize is ipex.optimize is ipex.frontend.optimize
    assert callable(empty_cache)
    assert importlib.import_module(f"{OLD}.frontend") is importlib.import_module("ipex.frontend")
    assert "optimize" in ipex.frontend.__all__ and "optimize" in dir(ipex.frontend)
    with pytest.raises(NotImplementedError, match="enable_auto_channels_last") as caught:
        from intel_extension_for_pytorch.frontend import auto_channels_last_flag  # noqa: F401
    assert isinstance(caught.value, NotOfferedModuleError) and isinstance(caught.value, ImportError)
    with pytest.raises(NotOfferedError, match=r"ipex\.optimize"):
        from intel_extension_for_pytorch.nn.utils._weight_prepack import (  # noqa: F401
            weight_prepack_with_ipex,
        )
    with pytest.raises(NotOfferedModuleError, match=r"use `ipex.fast_bert\(model\)`"):
        from intel_extension_for_pytorch.cpu.tpp.fused_bert import BertSelfAttention  # noqa: F401
    with pytest.raises(NotOfferedError, match=r"gelu_backward.* blocked layout"):
        _ = torch.ops.torch_ipex.fused_dense_gelu_bwd_unpad
    with pytest.raises(ImportError):
        from intel_extension_for_pytorch.frontend import bogus  # noqa: F401
    with pytest.raises(AttributeError):
        ipex.frontend.bogus  # noqa: B018
    assert not hasattr(ipex, "_set_optimized_model_for_generation")
    with pytest.raises(NotImplementedError, match=r"ipex\.llm\.optimize"):
        ipex._set_optimized_model_for_generation(None, None)


def test_xpu_without_its_package() -> None:
    import torch

    if importlib.util.find_spec("ipex_xpu_kernels") is not None:
        pytest.skip("ipex-xpu-kernels is installed")
    assert ipex.xpu.is_available() is torch.xpu.is_available()
    assert ipex.xpu.device_count() == torch.xpu.device_count()
    assert ipex.xpu.manual_seed is torch.xpu.manual_seed
    assert hasattr(ipex, "xpu") and not hasattr(ipex.xpu, "bogus")
    with pytest.raises(
        NotImplementedError, match=r"pip install 'ipex\[xpu\]', or use .ipex doctor"
    ):
        ipex.xpu.has_onemkl()


def test_names_that_the_xpu_package_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("ipex_xpu_kernels")
    package.__spec__ = ModuleSpec("ipex_xpu_kernels", None)
    monkeypatch.setitem(sys.modules, "ipex_xpu_kernels", package)
    migration.teach(package, "xpu")
    with pytest.raises(AttributeError, match="no attribute 'has_onemkl'"):
        _ = package.has_onemkl
    package.__dict__["has_onemkl"] = len
    assert package.has_onemkl is migration.lookup("xpu", "has_onemkl") is len


def test_values_that_change_are_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = importlib.import_module(f"{OLD}.xpu.lazy_init")
    for value in (True, False):
        monkeypatch.setattr(torch.xpu, "_initialized", value)
        assert lazy._initialized is value
    assert lazy._lazy_call is torch.xpu._lazy_call and "_lazy_call" in vars(lazy)


def test_private_names_that_programs_read() -> None:
    skip_without("cpu")
    skip_without("quantization")
    from intel_extension_for_pytorch.cpu.runtime import multi_stream
    from intel_extension_for_pytorch.quantization import _qconfig

    model = multi_stream.MultiStreamModule(
        torch.nn.ReLU(),
        input_split_hint=multi_stream.default_multi_stream_module_split_hint,
        output_concat_hint=multi_stream.default_multi_stream_module_concat_hint,
    )
    x = torch.randn(5, 3)
    assert torch.equal(model(x), x.relu())
    assert _qconfig.WOQ_LOWP_MODE_TO_STR[_qconfig.WoqLowpMode.BF16] == "bf16"
    assert _qconfig.WOQ_DTYPE_TO_STR[_qconfig.WoqWeightDtype.NF4] == "nf4"
    assert _qconfig.WOQ_QSCHEME_TO_STR[_qconfig.WoqWeightQScheme.SYMMETRIC] == "symmetric"
    modes = _qconfig.WOQ_ACT_QUANT_MODE_TO_STR
    assert modes[_qconfig.WoqActQuantMode.PER_BATCH_IC_BLOCK_SYM] == "per_batch_ic_block_sym"


def test_on_device() -> None:
    import torch

    with ipex.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = torch.nn.Linear(3, 4)
        ids = torch.zeros(2, dtype=torch.int64)
        here = torch.ones(2, device="cpu")
    assert layer.weight.device.type == "meta" and layer.weight.dtype == torch.bfloat16
    assert ids.device.type == "meta" and ids.dtype == torch.int64
    assert here.device.type == "cpu" and here.dtype == torch.bfloat16
    with ipex.OnDevice(dtype=torch.float, device="meta", enabled=False):
        assert torch.nn.Linear(3, 4).weight.device.type == "cpu"
    assert torch.empty(1).device.type == "cpu"
    with pytest.raises(ValueError, match="OnDevice: dtype must be a floating-point dtype"):
        ipex.OnDevice(dtype=torch.int8)


def test_channels_last_1d() -> None:
    import torch

    from intel_extension_for_pytorch.utils.channels_last_1d import (
        is_contiguous_channels_last_1d,
        to_channels_last_1d,
    )

    x = torch.randn(2, 3, 5)
    y = to_channels_last_1d(x)
    assert torch.equal(x, y) and is_contiguous_channels_last_1d(y)
    assert not is_contiguous_channels_last_1d(x)
    conv = torch.nn.Conv1d(3, 4, 3)
    expected = conv(x)
    assert to_channels_last_1d(conv) is conv
    assert is_contiguous_channels_last_1d(conv.weight)
    torch.testing.assert_close(conv(y), expected)
    with pytest.raises(ValueError, match="3 dimensions"):
        ipex.utils.channels_last_1d.tensor_to_channels_last_1d(torch.ones(2))


def test_switches_of_the_native_module() -> None:
    native = ipex._C
    native.disable_jit_linear_repack()  # called by servers before they load a model
    assert native.get_jit_linear_repack() is False
    native.enable_jit_linear_repack()
    native.disable_jit_opt()
    assert native.get_jit_opt() is False
    native.enable_jit_opt()
    assert native.get_jit_opt() is True
    assert native.isa_has_amx_fp16_support() in (True, False)
