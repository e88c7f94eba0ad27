# SPDX-License-Identifier: Apache-2.0
"""llama.cpp through llama-cpp-python: the same weights, as a GGUF file. Needs no torch."""

from __future__ import annotations

import ctypes
import importlib.util
import json
from pathlib import Path
from typing import Any

from ..task import Prepared, Task, UnsupportedError, greedy
from . import Peer

_FORMS = {
    "float32": ("F32", "float32"),
    "bfloat16": ("BF16", "bfloat16"),
    "int8": ("Q8_0", "int8"),
    "int4": ("Q4_0", "int4"),
}


class Engine(Peer):
    """llama.cpp."""

    title = "llama.cpp"
    module = "llama_cpp"
    install = "pip install llama-cpp-python gguf"
    kinds = ("llm",)

    def prepare(self, task: Task) -> Prepared:
        """Write the GGUF file, load it without mapping, and decode token by token."""
        import llama_cpp as L
        import numpy

        if importlib.util.find_spec("gguf") is None:
            raise UnsupportedError("writing its file needs gguf (pip install gguf)")
        form, precision = _FORMS[task.dtype]
        file = _write(task, form)
        # The library keeps a pointer to the callback: it must live as long as the process.
        self._quiet = L.llama_log_callback(lambda level, text, data: None)
        L.llama_log_set(self._quiet, ctypes.c_void_p(0))
        L.llama_backend_init()
        settings = L.llama_model_default_params()
        settings.use_mmap = False
        model = L.llama_model_load_from_file(str(file).encode(), settings)
        if not model:
            raise RuntimeError(
                f"llama.cpp must load {file}, which was written for it, got no model"
            )
        if task.shape["batch"] != 1:
            raise UnsupportedError("only batch 1 is covered here")
        vocab = task.shape["vocab_size"]
        asked = L.llama_context_default_params()
        asked.n_ctx = asked.n_batch = max(512, task.shape["prompt"] + task.shape["new"] + 8)
        asked.n_threads = asked.n_threads_batch = task.threads
        context = L.llama_init_from_model(model, asked)

        def step(ids: Any, place: int) -> Any:
            if not place:
                L.llama_memory_clear(L.llama_get_memory(context), True)
            tokens = ids[0].tolist()
            array = (L.llama_token * len(tokens))(*tokens)
            status = L.llama_decode(context, L.llama_batch_get_one(array, len(tokens)))
            if status:
                raise RuntimeError(f"llama_decode must return 0, got {status}")
            return numpy.ctypeslib.as_array(L.llama_get_logits_ith(context, -1), (1, vocab))

        return greedy(task, step, precision, form)


def _tensors(folder: Path) -> dict[str, Any]:
    """Return the float32 tensors of a safetensors file, read without torch."""
    import numpy

    raw = numpy.memmap(folder / "model.safetensors", dtype=numpy.uint8, mode="r")
    size = int(raw[:8].view(numpy.uint64)[0])
    about = json.loads(bytes(raw[8 : 8 + size]))
    found = {}
    for name, entry in about.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + place for place in entry["data_offsets"])
        data = raw[begin:end]
        if entry["dtype"] == "BF16":
            array = (data.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
        elif entry["dtype"] == "F32":
            array = data.view(numpy.float32)
        else:
            raise ValueError(f"{name} must be BF16 or F32, got {entry['dtype']}")
        found[name] = array.reshape(entry["shape"])
    return found


def _write(task: Task, form: str) -> Path:
    import gguf
    import numpy

    shape, kind = task.shape, gguf.GGMLQuantizationType[form]
    heads, groups = shape["num_attention_heads"], shape["num_key_value_heads"]
    width = shape["hidden_size"] // heads
    target = task.path / f"model.{form}.gguf"
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    tensors = _tensors(task.path / "model")

    def add(name: str, array: Any) -> None:
        array = numpy.ascontiguousarray(array)
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)

    def halves(array: Any, count: int) -> Any:
        # transformers rotates the halves of a head, llama.cpp pairs of neighbors: the rows change places.
        rows, columns = array.shape
        return array.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, -1)

    add("token_embd.weight", tensors["model.embed_tokens.weight"])
    add("output_norm.weight", tensors["model.norm.weight"])
    add("output.weight", tensors["lm_head.weight"])
    for layer in range(shape["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        add(theirs + "attn_norm.weight", tensors[ours + "input_layernorm.weight"])
        add(theirs + "ffn_norm.weight", tensors[ours + "post_attention_layernorm.weight"])
        add(theirs + "attn_q.weight", halves(tensors[ours + "self_attn.q_proj.weight"], heads))
        add(theirs + "attn_k.weight", halves(tensors[ours + "self_attn.k_proj.weight"], groups))
        add(theirs + "attn_v.weight", tensors[ours + "self_attn.v_proj.weight"])
        add(theirs + "attn_output.weight", tensors[ours + "self_attn.o_proj.weight"])
        add(theirs + "ffn_gate.weight", tensors[ours + "mlp.gate_proj.weight"])
        add(theirs + "ffn_up.weight", tensors[ours + "mlp.up_proj.weight"])
        add(theirs + "ffn_down.weight", tensors[ours + "mlp.down_proj.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
