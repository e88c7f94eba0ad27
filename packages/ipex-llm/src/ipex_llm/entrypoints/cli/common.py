# SPDX-License-Identifier: Apache-2.0
"""What the commands ``ipex llm ...`` share: options, loading a model, and errors for people."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    import torch

#: Value of ``--dtype`` -> dtype of the model, weight dtype of `WoqWeightDtype`.
DTYPES: dict[str, tuple[str, str | None]] = {
    "bf16": ("bfloat16", None),
    "fp16": ("float16", None),
    "fp32": ("float32", None),
    "int8": ("bfloat16", "INT8"),
    "int4": ("bfloat16", "INT4"),
    "nf4": ("bfloat16", "NF4"),
    "fp8": ("bfloat16", "FP8"),
    "mxfp4": ("bfloat16", "MXFP4"),
}

#: Groups of input features that share a scale, where nothing else is said.
_GROUPS = {"INT8": -1, "INT4": 128, "NF4": 64, "FP8": -1, "MXFP4": 32}


def _dtype(value: str) -> str:
    if value not in DTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(DTYPES)}, got {value!r}")
    return value


Model = Annotated[
    Path,
    typer.Option(
        exists=True,
        file_okay=False,
        help="Folder of a model: config, safetensors, tokenizer.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        callback=_dtype,
        help="Weights: bf16, fp16, fp32, int8, int4, nf4, fp8, mxfp4. Folders that are quantized keep theirs.",
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        help="Input features that share a scale, -1 for all (default: what is usual for the dtype)."
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of threads (default: torch's).")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python code that the folder names as its model, configuration or tokenizer.",
    ),
]


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Turn errors that arguments or files cause into one line on standard error and exit status 2."""
    from ipex_core.errors import IpexError

    try:
        yield
    except (
        *(IpexError, OSError, ValueError, MemoryError, ImportError, NotImplementedError, re.error),
    ) as error:
        text = str(error) or type(error).__name__
        if "trust_remote_code" in f"{error} {error.__cause__}":
            text += "\nread the Python code of the folder, and pass --trust-remote-code to run it"
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), text))
        raise typer.Exit(2) from error


def set_threads(count: int | None) -> None:
    """Set torch's number of threads."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a model folder; its code runs only if it is trusted.

    Raises:
        ValueError: There is no tokenizer.
    """
    from transformers import AutoTokenizer

    from ipex_quant.util.safetensors import read_config, stored_quantization

    if (folder / "config.json").is_file():  # which the tokenizer reads too, and trusts
        stored_quantization(folder, read_config(folder))
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # of its own libraries, and of those that read config.json
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{folder} must have a tokenizer, got: {reason}") from error


def quiet_transformers() -> None:
    """Switch off the progress bars of transformers: they would stand among the output."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def load_stock(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """Return the model of a folder as transformers makes it; its code runs only if it is trusted."""
    import transformers

    from ipex_quant.io import no_init
    from ipex_quant.util.safetensors import CheckpointError, read_config
    from ipex_quant.weight_only.build import building, check_fits

    quiet_transformers()
    with no_init():
        make = functools.partial(_without_weights, folder, trust_remote_code)
        check_fits(folder, read_config(folder), make, quantized=False)
    name = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    with building(folder):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **{name: dtype},
        )
    model, about = loaded
    missing = sorted(about["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{folder} must have all weights of the model, got no {missing[0]}{more}"
        )
    return model.eval()


def _without_weights(folder: Path, trust_remote_code: bool) -> Any:
    """Return the model of a folder without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust_remote_code
    )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return model


def load_model(
    folder: Path,
    dtype: str,
    group_size: int | None = None,
    lowp: str = "auto",
    trust_remote_code: bool = False,
    tp_group: Any = None,
) -> Any:
    """Return the model of a folder, optimized.

    Args:
        folder: A model folder.
        dtype: One of `DTYPES`; a folder with quantized weights keeps them, and takes the float dtype from here.
        group_size: For quantized dtypes.
        lowp: What quantized layers compute in: ``"int8"``, ``"bf16"``, or ``"auto"``: int8 for int4 and int8.
        trust_remote_code: Run the Python code that the folder names as its model.
        tp_group: Process group among which the weights are divided; all ranks call this.

    Raises:
        CheckpointError: The folder is incomplete or damaged.
        ValueError: The model is of a kind that transformers does not know.
    """
    import torch

    import ipex_llm
    from ipex_quant.util.safetensors import check_model_folder, stored_quantization
    from ipex_quant.weight_only.build import building

    config = check_model_folder(folder)
    name, weights = DTYPES[dtype]
    float_dtype = getattr(torch, name)
    if stored_quantization(folder, config) is not None:
        return _load_quantized(folder, float_dtype, trust_remote_code, tp_group)
    options: dict[str, Any] = {} if tp_group is None else {"tp_group": tp_group}
    if weights is not None:
        from ipex_quant import WoqLowpMode, WoqWeightDtype, get_weight_only_quant_qconfig_mapping

        if lowp == "auto":
            lowp = "int8" if weights in ("INT4", "INT8") else "bf16"
        options["quantization_config"] = get_weight_only_quant_qconfig_mapping(
            weight_dtype=WoqWeightDtype[weights],
            lowp_mode=WoqLowpMode[lowp.upper()],
            group_size=_GROUPS[weights] if group_size is None else group_size,
        )
    model = load_stock(folder, float_dtype, trust_remote_code)
    if tp_group is not None:
        torch.distributed.barrier()  # files may come slowly, and less time is given to wait from here on
    with building(folder):
        return ipex_llm.optimize(model, dtype=float_dtype, inplace=True, **options)


def load_encoder(folder: Path, kind: str, dtype: str, trust_remote_code: bool = False) -> Any:
    """Return the encoder of a folder, optimized.

    Args:
        folder: A model folder.
        kind: The class of transformers that loads it; see `ipex_llm.model_loader.pooling.encoder_class`.
        dtype: One of `DTYPES` without quantized weights.
        trust_remote_code: Run the Python code that the folder names as its model.

    Raises:
        CheckpointError: The folder is incomplete or damaged.
        ValueError: The dtype is a quantized one.
    """
    import torch
    import transformers

    from ipex_core.optimization import optimize
    from ipex_quant.util.safetensors import CheckpointError, check_model_folder
    from ipex_quant.weight_only.build import building

    name, weights = DTYPES[dtype]
    if weights is not None:
        raise ValueError(f"serve: dtype must be bf16, fp16 or fp32 for an encoder, got {dtype}")
    check_model_folder(folder)
    quiet_transformers()
    with building(folder):
        loaded: Any = getattr(transformers, kind).from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        model, about = loaded
        # The pooler of a base model is not used where states are pooled.
        missing = sorted(k for k in about["missing_keys"] if not k.startswith("pooler."))
        if missing:
            raise CheckpointError(
                f"{folder} must have all weights of the model, got no {missing[0]}"
            )
        return optimize(model.eval(), dtype=getattr(torch, name), inplace=True)


def _load_quantized(
    folder: Path, dtype: torch.dtype, trust_remote_code: bool, tp_group: Any = None
) -> Any:
    """Build the model without weights and let the optimization fill it from the folder."""
    import torch

    import ipex_llm
    from ipex_quant.io import no_init
    from ipex_quant.util.safetensors import CheckpointError, read_config
    from ipex_quant.weight_only.build import building, check_fits

    make = functools.partial(_without_weights, folder, trust_remote_code)
    with no_init():
        check_fits(folder, read_config(folder), make, quantized=True)
    rank, ranks = 0, 1
    if tp_group is not None:
        rank, ranks = (
            torch.distributed.get_rank(tp_group),
            torch.distributed.get_world_size(tp_group),
        )
    checkpoint = ipex_llm.utils.load_low_precision_checkpoint(folder, rank, ranks)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # Not on the meta device: buffers that no checkpoint has (of rotary embeddings) must be computed. Without
        # initialization the weights that are replaced are never touched, so they take no memory.
        with no_init(), building(folder):
            model = make().eval()
    finally:
        torch.set_default_dtype(before)
    # What stays without a value would be noise: every parameter, or parts in its place, must be in the checkpoint.
    layers = {name.rpartition(".")[0] for name in checkpoint[0] if not name.endswith(".bias")}
    missing = [
        name
        for name, _ in model.named_parameters()
        if name not in checkpoint[0]
        and not (rank and name.endswith(".bias"))  # only rank 0 adds what is added once
        and (name.endswith(".bias") or name.rpartition(".")[0] not in layers)
    ]
    if missing:
        raise CheckpointError(f"{folder} must have all weights of the model, got no {missing[0]}")
    options: dict[str, Any] = {}
    if tp_group is not None:
        options["tp_group"] = tp_group
        torch.distributed.barrier()
    with building(folder):
        return ipex_llm.optimize(
            model, dtype=dtype, inplace=True, low_precision_checkpoint=checkpoint, **options
        )


def read_key(file: Path) -> str:
    """Return the key of clients that a file has; editors of some systems put a mark of its encoding before it.

    Raises:
        ValueError: It has none, or one that no client can send.
    """
    try:
        key = file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        got = f"the byte {error.object[error.start]:#04x} at {error.start}"
        raise ValueError(f"serve: {file} must be text in UTF-8, got {got}") from None
    if not key:
        raise ValueError(f"serve: {file} must have a key, got an empty file")
    wrong = next((c for c in key if ord(c) < 32 or ord(c) == 127), None)
    if wrong is not None:
        raise ValueError(
            f"serve: {file} must have one line with a key, got the character {wrong!r}"
        )
    return key
