# SPDX-License-Identifier: Apache-2.0
"""The plug-in of vLLM against stand-ins made from recorded interfaces: what it chooses, overrides and computes."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import logging
import os
import sys
import types

import pytest
import torch
import vllm_stand_in as stand_in
from safetensors.torch import save_file
from torch.nn import functional

from ipex_llm.integrations import vllm as plugin
from ipex_llm.integrations.vllm import experts, linear, ranks

NEAR = {"rtol": 1e-5, "atol": 1e-5}
pytestmark = pytest.mark.usefixtures("fresh_plugin", "no_fakes_left")


find_gpu = plugin.gpu


# --- which platform ---------------------------------------------------------------------------------------------------


def test_every_supported_version_is_recorded():
    assert stand_in.VERSIONS == plugin.VERSIONS


@pytest.mark.parametrize("minor", stand_in.VERSIONS)
def test_the_platform_is_ours_without_a_gpu(minor, monkeypatch):
    stand_in.install(monkeypatch, minor)
    assert plugin.platform() == plugin.PLATFORM
    module, _, name = plugin.PLATFORM.rpartition(".")
    assert inspect.isclass(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "dev"])
def test_an_unknown_version_gets_one_line(version, monkeypatch, caplog):
    stand_in.install(monkeypatch)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with caplog.at_level(logging.INFO, "ipex"):
        assert plugin.platform() is None and plugin.platform() is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"must be 0.32.x or 0.33.x, got {version}" in line


def test_a_build_for_the_cpu_is_left_alone(monkeypatch, caplog):
    stand_in.install(monkeypatch)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.0+cpu")
    assert plugin.platform() is None and not caplog.records


def test_a_gpu_is_left_to_vllm(monkeypatch, caplog):
    stand_in.install(monkeypatch)
    monkeypatch.setattr(plugin, "gpu", lambda: "cuda")
    assert plugin.platform() is None and not caplog.records
    plugin.platform.cache_clear()
    monkeypatch.setenv("VLLM_PLUGINS", "ipex")
    assert plugin.platform() is None
    assert "a GPU (cuda) is there" in caplog.text


def test_the_kind_of_gpu(monkeypatch):
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    for name in ("cuda", "xpu"):
        monkeypatch.setattr(torch, name, types.SimpleNamespace(is_available=lambda: False))
    assert find_gpu() == ""
    seen = []

    def count():
        seen.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
        return True

    available = types.SimpleNamespace(is_available=count)
    monkeypatch.setattr(torch, "xpu", available)
    assert find_gpu() == "xpu"
    monkeypatch.setattr(torch, "xpu", types.SimpleNamespace(__name__="ipex_xpu_kernels.xpu"))
    assert find_gpu() == ""
    monkeypatch.setattr(torch, "cuda", available)
    assert find_gpu() == "cuda" and seen == [None, "1"]
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


def test_interfaces_that_changed_get_one_line(monkeypatch, caplog):
    stand_in.install(monkeypatch, without=("vllm.platforms.cpu",))
    assert plugin.platform() is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "not used: vllm 0.33.0" in line and "vllm.platforms.cpu" in line


def test_an_empty_list_of_gpus_is_made_definite(monkeypatch):
    stand_in.install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert plugin.platform() == plugin.PLATFORM
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"


def test_vllm_finds_the_plugin():
    if "site-packages" not in str(plugin.__file__):
        pytest.skip("ipex-llm is not installed, only on the path")
    for group, function in (("platform", plugin.platform), ("general", plugin.register)):
        found = importlib.metadata.entry_points(group=f"vllm.{group}_plugins", name="ipex")
        assert [entry.load() for entry in found] == [function]


# --- hooks ------------------------------------------------------------------------------------------------------------


def accepts(function, parameters):
    """Return whether a function takes what vLLM passes: each recorded parameter, by place and by name."""
    own = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in own.values()):
        return True
    wanted = [p.strip("*=") for p in parameters if not p.startswith("**")]
    given = list(own)[: len(wanted)]
    rest = list(own.values())[len(wanted) :]
    return given == wanted and all(p.default is not p.empty for p in rest)


def test_overrides_take_what_vllm_passes(modules):
    quantized = stand_in.ours("quantized")
    kernel = experts.expert_class(
        modules["vllm.model_executor.layers.fused_moe.experts.cpu_moe"].CPUUnquantizedExperts
    )
    classes = (
        *(
            stand_in.ours("cpu_platform").IpexPlatform,
            stand_in.ours("worker").IpexCommunicator,
            kernel,
        ),
        stand_in.ours("worker").IpexWorker,
        *(
            stand_in.ours("attention").IpexAttentionBackend,
            stand_in.ours("attention").IpexMetadataBuilder,
        ),
        *(stand_in.ours("attention").IpexAttentionImpl, quantized.IpexWeightOnlyKernel),
        *(quantized.IpexInt8Kernel, quantized.IpexFp8Kernel, quantized.IpexFp8BlockKernel),
    )
    checked = 0
    for made in classes:
        for base in made.__mro__[1:-1]:
            for name, theirs in vars(base).items():
                mine = vars(made).get(name)
                recorded = getattr(theirs, "__signature__", None)
                if mine is None or recorded is None:
                    continue
                mine = getattr(mine, "__func__", mine)
                assert accepts(mine, list(recorded.parameters)), f"{made.__name__}.{name}"
                checked += 1
    assert checked > 30
    assert accepts(linear.dispatch, ["layer", "remove_weight"])


def test_every_hook_finds_its_place(modules, monkeypatch):
    fake_layers(modules)
    first = plugin.register()
    assert plugin.register() == first
    assert {"dispatch_cpu_unquantized_gemm", "_POSSIBLE_KERNELS", "experts", "RMSNorm"} <= {*first}
    utils = modules["vllm.model_executor.layers.utils"]
    assert utils.dispatch_cpu_unquantized_gemm is linear.dispatch
    tables, cpu = modules[stand_in.KERNELS], stand_in.PlatformEnum.CPU
    quantized = stand_in.ours("quantized")
    for name, kernels in quantized.TABLES.items():
        assert getattr(tables, name)[cpu][: len(kernels)] == [*kernels]
        assert len(getattr(tables, name)[cpu]) == len(kernels) + 1
    oracle = modules["vllm.model_executor.layers.fused_moe.oracle.unquantized"]
    (kernel,) = oracle.backend_to_kernel_cls(stand_in.MoeBackend.CPU)
    assert kernel.__name__ == "IpexExperts"
    assert oracle.backend_to_kernel_cls(stand_in.MoeBackend.TRITON) == ["vLLM's TRITON"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [False, True])
def test_experts_are_chosen_by_one_op(modules, renormalize, dtype):
    fake_layers(modules)
    assert {"_softmax_topk", "_grouped_topk"} <= {*plugin.register()}
    router = modules["vllm.model_executor.layers.fused_moe.router.cpu_router"]
    torch.manual_seed(0)
    logits = torch.randn(5, 16).to(dtype)
    weights, ids = router._softmax_topk(logits, 3, renormalize)
    chances = logits.float().softmax(-1)
    top = chances.topk(3).values
    wanted = top / top.sum(-1, keepdim=True) if renormalize else top
    torch.testing.assert_close(weights, wanted)
    assert torch.equal(chances.gather(1, ids.long()), top) and ids.dtype == torch.int32
    # The two best of four groups, by the sum of their two best, with a bias that only chooses.
    bias = torch.randn(16, dtype=torch.float64)
    given = {"topk": 3, "renormalize": renormalize, "num_expert_group": 4, "topk_group": 2}
    weights, ids = router._grouped_topk(
        gating_output=logits,
        **given,
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        e_score_correction_bias=bias,
    )
    scores = logits.float().sigmoid()
    choice = (scores + bias.float()).view(5, 4, 4)
    groups = choice.topk(2).values.sum(-1).topk(2).indices
    allowed = torch.zeros(5, 4, 1).scatter(1, groups[..., None], 1).bool()
    best = choice.masked_fill(~allowed, -torch.inf).view(5, 16).topk(3).indices
    chosen = scores.gather(1, best)
    wanted = 2.5 * (chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen)
    assert torch.equal(ids.long(), best)
    torch.testing.assert_close(weights, wanted)
    with pytest.raises(RuntimeError, match="scoring_func must be one of softmax, sigmoid"):
        router._grouped_topk(logits, 3, True, 4, 2, "tanh", 1.0, None)


def test_a_hook_without_a_place_is_told_and_the_others_stay(modules, monkeypatch, caplog):
    fake_layers(modules)
    oracle = "vllm.model_executor.layers.fused_moe.oracle.unquantized"
    monkeypatch.setitem(importlib.sys.modules, oracle, None)
    del modules["vllm.model_executor.layers.utils"].dispatch_cpu_unquantized_gemm
    done = plugin.register()
    assert "_POSSIBLE_KERNELS" in done and "experts" not in done
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert [line.split(":")[1].strip() for line in lines] == ["linear", "experts"]


def test_other_platforms_get_layers_only_when_asked(monkeypatch):
    modules = stand_in.install(monkeypatch)
    fake_layers(modules)
    modules["vllm.platforms"].current_platform = types.SimpleNamespace(is_cpu=lambda: True)
    assert plugin.register() == ()
    monkeypatch.setenv("VLLM_PLUGINS", "ipex")
    assert "RMSNorm" in plugin.register()
    utils = modules["vllm.model_executor.layers.utils"]
    assert utils.dispatch_cpu_unquantized_gemm is not linear.dispatch


def fake_layers(modules):
    """Add a registry of layers that takes all."""
    table = {}

    class CustomOp:
        op_registry_oot = table

        @classmethod
        def register_oot(cls, made, name):
            table[name] = made

    contents = {
        "vllm.model_executor.custom_op": {"CustomOp": CustomOp},
        "vllm.model_executor.layers.layernorm": {"RMSNorm": CustomOp},
        "vllm.model_executor.layers.activation": {"SiluAndMul": CustomOp},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        importlib.sys.modules[name] = module
        modules[name] = module


# --- platform ---------------------------------------------------------------------------------------------------------


def selector(**options):
    return types.SimpleNamespace(
        **{
            "head_size": 64,
            "dtype": torch.bfloat16,
            "kv_cache_dtype": "auto",
            "use_mla": False,
            "use_sparse": False,
            **options,
        }
    )


def test_the_attention_backend_is_ours(modules):
    platform = stand_in.ours("cpu_platform").IpexPlatform
    path = platform.get_attn_backend_cls(None, selector())
    module, _, name = path.rpartition(".")
    backend = getattr(importlib.import_module(module), name)
    assert backend.get_name() == "CPU_ATTN"
    assert backend.supports_head_size(80) and not backend.supports_head_size(2048)
    assert backend.get_impl_cls().__name__ == "IpexAttentionImpl"
    for kind in ("decoder", "encoder", "encoder_only", "encoder_decoder"):
        assert backend.supports_attn_type(kind)
    assert not backend.supports_attn_type("other")


def test_latent_attention_is_vllms_backend_without_amx(modules):
    platform = stand_in.ours("cpu_platform").IpexPlatform
    path = platform.get_attn_backend_cls(None, selector(use_mla=True))
    assert path.endswith("cpu_mla.CPUMLABackend")
    config = stand_in.vllm_config(attention_config=stand_in.Config(backend=None))
    platform.check_and_update_config(config)
    assert config.attention_config.backend is None
    config.model_config.use_mla = True
    platform.check_and_update_config(config)
    assert config.attention_config.backend == "CPU_MLA"


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"use_mla": True, "kv_cache_dtype": "fp8"}, ValueError, "must be auto .* got fp8"),
        ({"use_sparse": True}, NotImplementedError, "sparse"),
        ({"head_size": 2000}, ValueError, "head_size must be between 1 and 1024, got 2000"),
        ({"dtype": torch.float64}, ValueError, "dtype must be float32, .* got torch.float64"),
        ({"kv_cache_dtype": "nvfp4"}, ValueError, "--kv-cache-dtype must be .* got nvfp4"),
        ({"kv_cache_dtype": "float16"}, ValueError, "--kv-cache-dtype must be .* got float16"),
    ],
)
def test_attention_that_is_not_there_is_refused(modules, options, kind, text):
    platform = stand_in.ours("cpu_platform").IpexPlatform
    with pytest.raises(kind, match=text):
        platform.get_attn_backend_cls(None, selector(**options))


def test_the_worker_is_ours_unless_another_is_named(modules):
    platform = stand_in.ours("cpu_platform").IpexPlatform
    config = stand_in.vllm_config()
    platform.check_and_update_config(config)
    module, _, name = config.parallel_config.worker_cls.rpartition(".")
    assert getattr(importlib.import_module(module), name) is stand_in.ours("worker").IpexWorker
    config.parallel_config.worker_cls = "another.Worker"
    platform.check_and_update_config(config)
    assert config.parallel_config.worker_cls == "another.Worker"


def test_the_cache_is_a_part_of_what_is_free(modules):
    size, mib = stand_in.ours("worker").cache_bytes, 1 << 20
    assert size(1000 * mib, 1, 0) == size(1000 * mib, 1, 600 * mib) == 500 * mib
    assert size(1000 * mib, 2, 600 * mib) == 250 * mib
    assert size(1000 * mib, 1, 100 * mib) == 200 * mib  # two batches
    assert size(1000 * mib, 1, mib) == 64 * mib
    assert size(100 * mib, 1, mib) == 50 * mib


def test_the_worker_plans_with_what_is_free(modules, monkeypatch):
    module = stand_in.ours("worker")
    monkeypatch.setattr(module, "available_memory", lambda: 1 << 33)
    config = stand_in.vllm_config()
    worker = module.IpexWorker(config)
    assert config.cache_config.gpu_memory_utilization < 0.1  # what 0.32 checks at the start
    spec = types.SimpleNamespace(max_memory_usage_bytes=lambda config: 1 << 27)
    worker.get_kv_cache_spec = lambda: {"first": spec, "second": spec}
    warm = []
    worker._should_warm_up_model = lambda: True
    worker.model_runner = types.SimpleNamespace(warming_up_model=lambda: warm.append(1))
    assert worker.determine_available_memory() == 1 << 31 and warm == [1]
    config.parallel_config.tensor_parallel_size = 4
    assert worker.determine_available_memory() == 1 << 30
    config.parallel_config.data_parallel_size_local = 2
    assert worker.determine_available_memory() == 1 << 29
    for name, value in (("kv_cache_memory_bytes", 1 << 20), ("gpu_memory_utilization", 0.5)):
        config = stand_in.vllm_config()
        setattr(config.cache_config, name, value)
        worker = module.IpexWorker(config)
        assert getattr(config.cache_config, name) == value
        with pytest.raises(stand_in.Stated, match="CPUWorker"):
            worker.determine_available_memory()


@pytest.mark.parametrize(
    ("assigned", "kept"), [([1], None), ([0], [0]), ([0, 1], [0, 1]), (None, None)]
)
def test_replicas_without_a_memory_node_use_all(modules, monkeypatch, assigned, kept):
    memory = modules["vllm.utils.cpu_resource_utils"]
    monkeypatch.setattr(memory, "get_memory_affinity", lambda: [0])
    config = stand_in.vllm_config()
    config.parallel_config.assigned_physical_gpu_ids = assigned
    stand_in.ours("worker").IpexWorker(config)
    assert config.parallel_config.assigned_physical_gpu_ids == kept


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
def test_later_stages_can_receive_before_the_first_run(modules, monkeypatch, first, stages):
    module = stand_in.ours("worker")
    worker = module.IpexWorker(stand_in.vllm_config())
    monkeypatch.setattr(module.CPUWorker, "load_model", lambda self, **options: options)
    monkeypatch.setattr(module, "_first_stage", lambda: first)
    monkeypatch.setattr(module, "_check_memory", lambda model, parallel: None)
    worker.model_config = None

    def make(**sizes):
        return sizes

    worker.parallel_config = stand_in.Config(pipeline_parallel_size=stages)
    worker.model_runner = types.SimpleNamespace(
        intermediate_tensors=None,
        model=types.SimpleNamespace(make_empty_intermediate_tensors=make),
        max_num_tokens=7,
        dtype=torch.float32,
        device="cpu",
    )
    assert worker.load_model(a=1) == {"a": 1}
    made = worker.model_runner.intermediate_tensors
    wanted = {"batch_size": 7, "dtype": torch.float32, "device": "cpu"}
    assert made == (wanted if stages > 1 and not first else None)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(modules, monkeypatch, tmp_path):
    module = stand_in.ours("worker")
    weights = {
        "a": torch.zeros(100, 10, dtype=torch.bfloat16),
        "b": torch.zeros(50, dtype=torch.int8),
    }
    save_file(weights, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.zeros(25)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file(weights, tmp_path / "consolidated.safetensors")  # the same again
    assert module.weight_bytes(tmp_path, None) == 2000 + 50 + 100
    assert module.weight_bytes(tmp_path, 2) == 2000 + 50 + 50
    assert module.weight_bytes(tmp_path, 4) == 4000 + 50 + 100
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"c": "model-00002-of-00002.safetensors"}})
    )
    assert module.weight_bytes(tmp_path, 4) == 100
    (tmp_path / "model.safetensors.index.json").unlink()
    for damaged in (b"", b"\x10", b"\x05\0\0\0\0\0\0\0[1]xx"):
        (tmp_path / "model-00003.safetensors").write_bytes(damaged)
        assert module.weight_bytes(tmp_path, 4) == 0
    (tmp_path / "model-00003.safetensors").unlink()
    assert module.weight_bytes(tmp_path / "absent", 4) == 0

    worker = module.IpexWorker(stand_in.vllm_config())
    monkeypatch.setattr(module.CPUWorker, "load_model", lambda self, **options: "loaded")
    monkeypatch.setattr(module, "_first_stage", lambda: True)
    worker.model_runner = types.SimpleNamespace()
    worker.parallel_config = stand_in.Config(pipeline_parallel_size=1, tensor_parallel_size=1)
    worker.model_config = types.SimpleNamespace(
        model=str(tmp_path), dtype=torch.float32, quantization=None, hf_config=None
    )
    for free, fits in ((4150, True), (4149, False), (None, True)):
        monkeypatch.setattr(module, "available_memory", lambda free=free: free)
        if fits:
            assert worker.load_model() == "loaded"
            continue
        with pytest.raises(MemoryError, match=r"free memory of 4.1 KiB, got 4.1 KiB"):
            worker.load_model()
        worker.parallel_config.tensor_parallel_size = 2
        assert worker.load_model() == "loaded"
        worker.parallel_config.tensor_parallel_size = 1
        # Rounded when it is loaded: how small it gets is not in the file.
        worker.model_config.quantization = "fp8"
        worker.model_config.hf_config = types.SimpleNamespace()
        assert worker.load_model() == "loaded"
        worker.model_config.quantization = None


def test_replacements_of_triton_are_registered_once(modules, monkeypatch):
    platform = stand_in.ours("cpu_platform").IpexPlatform
    calls = []
    base = modules["vllm.platforms.cpu"].CpuPlatform
    monkeypatch.setattr(
        base, "register_triton_kernel_overrides", classmethod(lambda cls: calls.append(cls))
    )
    platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides()
    assert calls == [platform]
    # The order in which vLLM passes the arguments of the kernel, in both versions.
    own = modules["vllm.utils.cpu_triton_utils"]._compute_slot_mapping_kernel_impl
    assert list(inspect.signature(own).parameters)[2:7] == [
        *("query_start_loc", "positions", "block_table", "block_table_stride", "slot_mapping")
    ]


# --- attention --------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 16, 8, 24


def implementation(attention, **options):
    given = {
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        **options,
    }
    return attention.IpexAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, **given)


def step_of(attention, queries, keys, causal=True, spec=None):
    """Return the metadata of sequences with so many new tokens and keys, and the slots of all their keys."""
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(BLOCKS, generator=generator).tolist()
    table = torch.full((len(keys) + 1, 8), -1, dtype=torch.int32)
    slots = []
    for row, count in enumerate(keys):
        own = [order.pop() for _ in range(-(-count // BLOCK))]
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        slots += [own[i // BLOCK] * BLOCK + i % BLOCK for i in range(count)]
    total = sum(queries)
    starts = torch.tensor([0, *queries, 0]).cumsum(0).int()
    batch = types.SimpleNamespace(
        num_reqs=len(keys),
        num_actual_tokens=total,
        max_query_len=max(queries),
        max_seq_len=max(keys),
        query_start_loc=starts,
        seq_lens=torch.tensor([*keys, 7], dtype=torch.int32),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots)[new_rows(queries, keys)],
        causal=causal,
    )
    builder = attention.IpexMetadataBuilder(spec, ["layer"], None, torch.device("cpu"))
    return builder.build(0, batch), torch.tensor(slots)


def new_rows(queries, keys):
    """Return which of the packed keys are of the step's tokens."""
    return torch.cat([torch.arange(m) >= m - n for n, m in zip(queries, keys, strict=True)])


def dense(query, key, value, queries, keys, *, causal=True, window=0, both=False):
    """Return the attention of packed sequences, one at a time."""
    outs, q0, k0 = [], 0, 0
    for n, m in zip(queries, keys, strict=True):
        q, k, v = (
            x[b : b + c].transpose(0, 1)
            for x, b, c in ((query, q0, n), (key, k0, m), (value, k0, m))
        )
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        places, own = torch.arange(m), torch.arange(m - n, m)[:, None]
        mask = torch.ones(n, m, dtype=torch.bool)
        if causal:
            mask &= places <= own
        if window:
            mask &= places > own - window
            if both:
                mask &= places < own + window
        outs.append(
            functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)
        )
        q0, k0 = q0 + n, k0 + m
    return torch.cat(outs)


LAYER = types.SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)
QUERIES, KEYS = (5, 1, 3), (5, 20, 11)


def drawn(*counts):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(count, heads, SIZE, generator=generator)
        for count, heads in zip(counts, (HEADS, KV_HEADS, KV_HEADS), strict=True)
    ]


@pytest.mark.parametrize("window", [None, 4])
def test_attention_over_a_paged_cache(modules, window):
    attention = stand_in.ours("attention")
    impl = implementation(attention, sliding_window=window)
    step, slots = step_of(attention, QUERIES, KEYS)
    query, key, value = drawn(sum(QUERIES), sum(KEYS), sum(KEYS))
    cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)
    new = new_rows(QUERIES, KEYS)
    impl.do_kv_cache_update(LAYER, key[~new], value[~new], cache, slots[~new])
    out = torch.full((sum(QUERIES) + 2, HEADS * SIZE), 9.0)
    padded, *fresh = (torch.cat([x, x[:2] + 1]) for x in (query, key[new], value[new]))
    assert impl.forward(LAYER, padded, *fresh, cache, step, out) is out
    wanted = dense(query, key, value, QUERIES, KEYS, window=window or 0)
    torch.testing.assert_close(out[: sum(QUERIES)].view(-1, HEADS, SIZE), wanted, **NEAR)
    assert (out[sum(QUERIES) :] == 9).all()


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_attention_over_an_fp8_cache(modules, name):
    attention = stand_in.ours("attention")
    impl = implementation(attention, kv_cache_dtype=name)
    step, slots = step_of(attention, QUERIES, KEYS)
    query, key, value = drawn(sum(QUERIES), sum(KEYS), sum(KEYS))
    stored = attention.CACHE_DTYPES[name]
    key, value = (x.to(stored).float() for x in (key, value))  # exact in the cache
    cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * SIZE, dtype=torch.uint8)
    new = new_rows(QUERIES, KEYS)
    impl.do_kv_cache_update(LAYER, key[~new], value[~new], cache, slots[~new])
    out = torch.zeros(sum(QUERIES), HEADS, SIZE)
    impl.forward(LAYER, query, key[new], value[new], cache, step, out)
    torch.testing.assert_close(out, dense(query, key, value, QUERIES, KEYS), **NEAR)


@pytest.mark.parametrize("given", [True, False])
def test_attention_over_a_cache_that_another_layer_has_written(modules, given):
    attention = stand_in.ours("attention")
    impl = implementation(attention, kv_sharing_target_layer_name="first" if given else None)
    step, slots = step_of(attention, QUERIES, KEYS)
    query, key, value = drawn(sum(QUERIES), sum(KEYS), sum(KEYS))
    new = [torch.full_like(x[: sum(QUERIES)], 9.0) if given else None for x in (key, value)]
    wanted = dense(query, key, value, QUERIES, KEYS)
    for number in (0, 1):  # another cache has other views
        cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)
        impl.do_kv_cache_update(LAYER, key, value + number, cache, slots)
        out = torch.zeros(sum(QUERIES), HEADS, SIZE)
        impl.forward(LAYER, query, *new, cache, step, out)
        torch.testing.assert_close(out, wanted + number, **NEAR)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_of_an_encoder_has_no_cache(modules, window):
    attention = stand_in.ours("attention")
    impl = implementation(attention, attn_type="encoder_only", sliding_window=window)
    step, _ = step_of(attention, QUERIES, QUERIES, causal=False)
    query, key, value = drawn(*[sum(QUERIES)] * 3)
    out = torch.zeros(sum(QUERIES), HEADS * SIZE)
    impl.do_kv_cache_update(LAYER, key, value, torch.zeros(0), torch.zeros(0))
    impl.forward(LAYER, query, key, value, torch.zeros(0), step, out)
    wanted = dense(query, key, value, QUERIES, QUERIES, causal=False, window=window or 0, both=True)
    torch.testing.assert_close(out.view(-1, HEADS, SIZE), wanted, **NEAR)


def test_cross_attention_sees_all_keys(modules):
    attention = stand_in.ours("attention")
    spec = modules["vllm.v1.kv_cache_interface"].CrossAttentionSpec()
    step, _ = step_of(attention, QUERIES, KEYS, spec=spec)
    assert step.causal is False
    assert step_of(attention, QUERIES, KEYS)[0].causal is True


def test_bad_calls_of_the_attention_are_refused(modules):
    attention = stand_in.ours("attention")
    with pytest.raises(NotImplementedError, match="one bool for the batch"):
        step_of(attention, QUERIES, KEYS, causal=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="one number for each of 4 heads, got 3"):
        implementation(attention, sinks=torch.zeros(3))
    impl = implementation(attention)
    step, _ = step_of(attention, QUERIES, KEYS)
    nothing = torch.zeros(0)
    with pytest.raises(NotImplementedError, match="output_scale must be None"):
        impl.forward(LAYER, *[nothing] * 4, step, nothing, output_scale=nothing)
    assert impl.forward(LAYER, *[nothing] * 4, None, nothing) is nothing


# --- torch ------------------------------------------------------------------------------------------------------------


def test_another_torch_than_vllm_wants_is_told(modules, monkeypatch, caplog):
    wanted = ["numpy", "torchvision==0.29.0", "torch==2.14.0", "ray ; extra == 'ray'"]
    assert plugin.torch_problem(wanted, "2.14.0+cu130") == ""
    assert plugin.torch_problem(["torch>=2.10", "torch-extra==1.0"], "2.9.0") == ""
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch==9.9.0"])
    assert plugin.platform() == plugin.PLATFORM
    assert "torch must be 9.9.0, got 2." in caplog.text


# --- cores of ranks ---------------------------------------------------------------------------------------------------


def test_ranks_of_a_machine_are_bound_with_all_its_replicas(modules, monkeypatch):
    counts = []
    monkeypatch.setattr(ranks, "bind", counts.append)
    config = stand_in.vllm_config()
    config.parallel_config.local_world_size = 2
    config.parallel_config.data_parallel_size_local = 3
    stand_in.ours("cpu_platform").IpexPlatform.check_and_update_config(config)
    assert counts == [6]


def test_the_cores_of_this_machine_are_vllms_list(modules, monkeypatch):
    listed = [types.SimpleNamespace(id=i, physical_core=i % 4, numa_node=0) for i in range(8)]
    module = modules["vllm.utils.cpu_resource_utils"]
    monkeypatch.setattr(module, "get_allowed_cpu_list", lambda: listed)
    limits = types.SimpleNamespace(cpus=None)
    monkeypatch.setattr(ranks, "cgroup_limits", lambda: limits)
    assert ranks.cores_of_this_machine(2) == [[0, 1], [2, 3]]
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "2")
    assert ranks.cores_of_this_machine(2) == [[0], [2]]
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU")
    limits.cpus = 2.0
    assert ranks.cores_of_this_machine(2) == [[0], [2]]


def test_ranks_of_ray_are_counted_by_a_resource_and_bound(modules, monkeypatch):
    module, executor = stand_in.ours("ray_executor"), modules["vllm.v1.executor.ray_executor_v2"]
    config = stand_in.vllm_config()
    config.parallel_config.distributed_executor_backend = "ray"
    platform = stand_in.ours("cpu_platform").IpexPlatform
    platform.check_and_update_config(config)
    assert config.parallel_config.distributed_executor_backend is module.IpexRayExecutor
    assert platform.ray_device_key == "ipex_rank"

    made = []
    stock = executor.RayWorkerProc
    monkeypatch.setattr(
        executor.RayExecutorV2, "_init_executor", lambda self: made.append(executor.RayWorkerProc)
    )
    ours = module.IpexRayExecutor()
    here, there = (
        types.SimpleNamespace(_is_remote_reader=far, dequeue=lambda timeout=None: timeout)
        for far in (False, True)
    )
    ours.response_mqs, ours.is_failed = [here, there], False
    ours._init_executor()
    assert made == [module.IpexRayWorker] and executor.RayWorkerProc is stock
    assert here.dequeue() is None and there.dequeue() == module._LOOKS

    context = types.SimpleNamespace(get_node_id=lambda: "a")
    ray = types.SimpleNamespace(get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    memory = modules["vllm.utils.cpu_resource_utils"]
    monkeypatch.setattr(memory, "get_memory_affinity", lambda pid=0: [1, 3])
    assert module.IpexRayWorker().get_node_and_physical_gpu_ids() == ("a", [1])

    given = []
    monkeypatch.setattr(
        stock, "initialize_worker", lambda self, *arguments: given.append(arguments)
    )
    monkeypatch.setattr(ranks, "cores_of_this_machine", lambda count: [[0], [5, 7]][:count])
    bound, threads = [], []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    driver = {ranks.VARIABLE: "0-63", "A": "1"}
    module.IpexRayWorker().initialize_worker(1, {}, "tcp", driver, [0, 0])
    assert given.pop() == (1, {}, "tcp", {"A": "1"}, [0]) and not bound  # the user said nobind
    monkeypatch.delenv(ranks.VARIABLE)
    module.IpexRayWorker().initialize_worker(1, {}, "tcp", driver, [0, 0])
    assert bound == [[5, 7]] and threads == [2]


def test_a_wait_for_another_machine_ends_when_a_rank_has_ended(modules, monkeypatch):
    module = stand_in.ours("ray_executor")
    monkeypatch.setattr(module, "_LOOKS", 0.01)
    owner, waited = types.SimpleNamespace(is_failed=False), []

    def wait(timeout):
        waited.append(timeout)
        owner.is_failed = len(waited) == 3
        raise TimeoutError

    with pytest.raises(RuntimeError, match="all ranks of a model must run, got one that has ended"):
        module.dequeue(lambda: owner, wait)
    assert waited == [0.01] * 3
    with pytest.raises(RuntimeError, match="one that has ended"):
        module.dequeue(lambda: None, wait)
    with pytest.raises(TimeoutError):
        module.dequeue(lambda: owner, wait, timeout=0)
    assert module.dequeue(lambda: owner, lambda timeout: (timeout, "answer"), 0.004)[1] == "answer"


def cpus(nodes, cores, threads=2):
    """Return CPUs numbered as Linux does: the first thread of all cores, then the second."""
    count = nodes * cores
    return [ranks.Cpu(t * count + c, c, c // cores) for t in range(threads) for c in range(count)]


@pytest.mark.parametrize(
    ("nodes", "cores", "count", "quota", "wanted"),
    [
        (1, 2, 1, None, ["0-1"]),
        (1, 2, 2, None, ["0", "1"]),
        (2, 4, 1, None, ["0-3"]),
        (2, 4, 2, None, ["0-3", "4-7"]),
        (2, 4, 3, None, ["0-1", "2-3", "4-7"]),
        (2, 4, 2, 5.5, ["0-1", "4-5"]),
        (1, 4, 2, 1.0, ["0", "2"]),
        (1, 16, 2, None, ["0-6", "8-14"]),
        (1, 2, 3, None, []),
    ],
)
def test_each_rank_gets_cores_of_one_node(nodes, cores, count, quota, wanted):
    found = ranks.cores_of_ranks(cpus(nodes, cores), count, quota)
    spans = [f"{a[0]}-{a[-1]}" if len(a) > 1 else str(a[0]) for a in found]
    assert spans == wanted
    assert all(part == [*range(part[0], part[-1] + 1)] for part in found)


def test_the_affinity_mask_and_the_reserve_of_the_user_count():
    some = [cpu for cpu in cpus(1, 8) if cpu.core in (1, 2, 5, 6)]
    assert ranks.cores_of_ranks(some, 2) == [[1, 2], [5, 6]]
    assert ranks.cores_of_ranks(some, 2, spare=1) == [[1], [5]]


def test_binding_is_left_to_the_user(monkeypatch, caplog):
    monkeypatch.setattr(ranks, "cores_of_this_machine", lambda count: [[0, 1], [2, 3]][:count])
    monkeypatch.setenv(ranks.VARIABLE, "nobind")
    monkeypatch.setenv(ranks.BOUND, "")
    ranks.bind(2)
    assert os.environ[ranks.VARIABLE] == "nobind"
    monkeypatch.setenv(ranks.VARIABLE, "auto")
    ranks.bind(2)
    assert os.environ[ranks.VARIABLE] == "0,1|2,3"
    monkeypatch.setattr(ranks, "cores_of_this_machine", lambda count: [])
    monkeypatch.delenv(ranks.VARIABLE)
    ranks.bind(3)
    assert os.environ[ranks.VARIABLE] == "nobind" and "3 ranks on this machine" in caplog.text


def test_another_number_of_ranks_has_other_cores(modules, monkeypatch):
    found = {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]]}
    monkeypatch.setattr(ranks, "cores_of_this_machine", found.__getitem__)
    monkeypatch.setenv(ranks.VARIABLE, "auto")
    monkeypatch.setenv(ranks.BOUND, "")
    ranks.bind(1)
    assert os.environ[ranks.VARIABLE] == "0,1,2,3"
    monkeypatch.setattr(ranks, "cores_of_this_machine", lambda count: [[9]] * count)
    ranks.bind(1)  # in a rank, which has fewer cores
    assert os.environ[ranks.VARIABLE] == "0,1,2,3"
    monkeypatch.setattr(ranks, "cores_of_this_machine", found.__getitem__)
    ranks.bind(2)
    assert os.environ[ranks.VARIABLE] == "0,1|2,3"
    monkeypatch.setenv(ranks.VARIABLE, "5|6")  # of the user
    ranks.bind(1)
    assert os.environ[ranks.VARIABLE] == "5|6"


# --- sums over ranks --------------------------------------------------------------------------------------------------


def test_sums_go_through_ipex(modules, monkeypatch):
    module = stand_in.ours("worker")
    calls = []
    monkeypatch.setattr(module.distributed, "all_reduce", lambda x, group: calls.append((x, group)))
    made = module.IpexCommunicator()
    made.device_group = "group"
    x = torch.ones(3)
    total = made.all_reduce(x)
    assert total is not x and torch.equal(
        total, x
    )  # an op of vLLM, which may not return its argument
    assert len(calls) == 1 and calls[0][0] is total and calls[0][1] == "group"
    assert stand_in.ours("cpu_platform").IpexPlatform.use_custom_op_collectives()


def test_attention_is_an_op_where_layers_are_compiled(modules):
    platform = stand_in.use_our_platform(modules)
    for mode, opaque in ((0, False), (3, True)):
        config = stand_in.vllm_config(compilation_config=stand_in.Config(mode=mode))
        modules["vllm.config"].get_current_vllm_config_or_none = lambda c=config: c
        assert platform.opaque_attention_op() is opaque
    modules["vllm.config"].get_current_vllm_config_or_none = lambda: None
    assert platform.opaque_attention_op() is True


def test_an_attention_backend_for_gpus_is_told(modules, caplog):
    platform = stand_in.use_our_platform(modules)
    asked = stand_in.Config(
        use_sparse=False, use_mla=False, head_size=64, dtype=torch.float32, kv_cache_dtype="auto"
    )
    for backend in (None, types.SimpleNamespace(name="CPU_ATTN")):
        assert platform.get_attn_backend_cls(backend, asked).endswith("IpexAttentionBackend")
    assert not caplog.records
    platform.get_attn_backend_cls(types.SimpleNamespace(name="FLASH_ATTN"), asked)
    assert "attention backend FLASH_ATTN is for GPUs: CPU_ATTN is used" in caplog.text


def test_numbers_of_sequences_reach_the_result_in_any_dtype(modules):
    place = stand_in.ours("cpu_platform")
    own = modules["vllm.utils.cpu_triton_utils"]
    place._mend_expand()  # this vLLM has no such function
    assert not hasattr(own, "_expand_kernel_impl")
    own._expand_kernel_impl = None
    place._mend_expand()
    counts = torch.tensor([2, 5])  # running sum
    for given in (torch.tensor([7, 0], dtype=torch.int32), torch.tensor([0.5, 0.0])):
        output = torch.full((6,), 9).to(given.dtype)
        own._expand_kernel_impl(output, given, counts, 0, 1, MAX_NUM_TOKENS=4)
        first = given[0].item()
        assert output.tolist() == [first, first, 1, 1, 1, 9]
