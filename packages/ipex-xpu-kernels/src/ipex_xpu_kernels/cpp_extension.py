# SPDX-License-Identifier: Apache-2.0
"""``torch.xpu.cpp_extension``: C++ extensions with SYCL kernels, compiled by the compiler of the oneAPI toolkit (icpx).

Without the toolkit use ``ipex.xpu.load_inline``, whose compiler comes with the SYCL run-time. An extension reaches the
queue of a stream by ``torch.xpu.current_stream().sycl_queue``, the address of a ``sycl::queue``.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from setuptools import Extension
    from torch.utils.cpp_extension import BuildExtension as DpcppBuildExtension

__all__ = ["DPCPPExtension", "DpcppBuildExtension", "include_paths", "library_paths", "load"]

_FLAGS = ["-fsycl", "-fPIC", "-std=c++20"]


def compiler(function: str) -> str:
    """Return the path of icpx.

    Args:
        function: For the message.

    Raises:
        RuntimeError: It is neither on the path, nor in ``CMPLR_ROOT``, nor named by ``CXX``.
    """
    root = os.environ.get("CMPLR_ROOT")
    named = os.environ.get("CXX", "")
    candidates = [named if Path(named).name in ("icpx", "dpcpp") else "", "icpx"]
    if root:
        candidates.append(str(Path(root) / "bin" / "icpx"))
    for candidate in candidates:
        found = shutil.which(candidate) if candidate else None
        if found:
            return found
    raise RuntimeError(
        f"{function}: the SYCL compiler icpx was not found: install the oneAPI toolkit and source its setvars.sh, or"
        " set CMPLR_ROOT or CXX. Kernels alone need no toolkit: ipex.xpu.load_inline compiles them in the process"
    )


def include_paths() -> list[str]:
    """Return the folders of headers that an extension needs: headers of torch and the SYCL run-time."""
    from torch.utils import cpp_extension

    paths: list[str] = list(cpp_extension.include_paths())
    root = os.environ.get("CMPLR_ROOT")
    for folder in (Path(root) / "include" if root else None, Path(sys.prefix) / "include"):
        # That of Python holds the headers of the SYCL run-time, if its package is installed.
        if folder is not None and (folder / "sycl" / "sycl.hpp").exists():
            paths.append(str(folder))
            break
    return paths


def library_paths() -> list[str]:
    """Return the folders of libraries that an extension needs: torch and the SYCL run-time."""
    from torch.utils import cpp_extension

    paths: list[str] = list(cpp_extension.library_paths())
    root = os.environ.get("CMPLR_ROOT")
    for folder in (Path(root) / "lib" if root else None, Path(sys.prefix) / "lib"):
        if folder is not None and any(folder.glob("libsycl.so*")):
            paths.append(str(folder))
            break
    return paths


def DPCPPExtension(name: str, sources: Sequence[str], *args: Any, **kwargs: Any) -> Extension:
    """Return a ``setuptools.Extension`` for C++ and SYCL sources.

    Args:
        name: Of the module.
        sources: Files.
        args: Further arguments of ``setuptools.Extension``.
        kwargs: As well; ``extra_compile_args`` is a list, or a mapping whose key ``cxx`` has one.

    Example:
        >>> from setuptools import setup  # doctest: +SKIP
        >>> setup(name="mine", ext_modules=[DPCPPExtension("mine", ["mine.cpp"])],
        ...       cmdclass={"build_ext": DpcppBuildExtension})  # doctest: +SKIP
    """
    from torch.utils import cpp_extension

    flags = kwargs.pop("extra_compile_args", [])
    if isinstance(flags, dict):
        unknown = set(flags) - {"cxx"}
        if unknown:
            raise ValueError(
                f"DPCPPExtension: extra_compile_args must have only the key 'cxx', got {sorted(unknown)}"
            )
        flags = flags.get("cxx", [])
    kwargs["extra_compile_args"] = {"cxx": [*_FLAGS, *flags]}
    kwargs["extra_link_args"] = ["-fsycl", *kwargs.get("extra_link_args", [])]
    kwargs["include_dirs"] = [*include_paths(), *kwargs.get("include_dirs", [])]
    kwargs["library_dirs"] = [*library_paths(), *kwargs.get("library_dirs", [])]
    extension: Extension = cpp_extension.CppExtension(name, list(sources), *args, **kwargs)
    return extension


def _build_extension() -> Any:
    from torch.utils import cpp_extension

    class DpcppBuildExtension(cpp_extension.BuildExtension):  # type: ignore[misc]
        """``build_ext`` that compiles with icpx; ``with_options(use_ninja=..., no_python_abi_suffix=...)``."""

        def build_extensions(self) -> None:
            icpx = compiler("DpcppBuildExtension")
            old = {name: os.environ.get(name) for name in ("CXX", "CC")}
            os.environ["CXX"] = os.environ["CC"] = icpx
            for part in (
                "compiler_so",
                "compiler_cxx",
                "linker_so",
                "compiler_so_cxx",
                "linker_so_cxx",
            ):
                command = getattr(self.compiler, part, None)
                if command:
                    setattr(self.compiler, part, [icpx, *command[1:]])
            try:
                super().build_extensions()
            finally:
                for name, value in old.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value

    return DpcppBuildExtension


def load(
    name: str,
    sources: str | Sequence[str],
    extra_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str] | None = None,
    build_directory: str | None = None,
    verbose: bool = False,
    is_python_module: bool = True,
    is_standalone: bool = False,
    keep_intermediates: bool = True,
) -> Any:
    """Compile sources with icpx and load the module.

    Args:
        name: Of the module.
        sources: Files.
        extra_cflags: Further options of the compiler.
        extra_ldflags: Further options of the linker.
        extra_include_paths: Further folders of headers.
        build_directory: Where to build; the default is in ``TORCH_EXTENSIONS_DIR``.
        verbose: Whether to print the commands.
        is_python_module: Whether to import the result; else it is only loaded.
        is_standalone: Whether to make a program.
        keep_intermediates: Kept for IPEX's sake.

    Returns:
        The module, or the path of the program.

    Raises:
        RuntimeError: There is no icpx, or the sources do not compile.
    """
    from torch.utils import cpp_extension

    icpx = compiler("load")
    old = os.environ.get("CXX")
    os.environ["CXX"] = icpx
    try:
        return cpp_extension.load(
            name,
            [sources] if isinstance(sources, str) else list(sources),
            extra_cflags=[*_FLAGS, *(extra_cflags or ())],
            extra_ldflags=["-fsycl", *(f"-L{p}" for p in library_paths()), *(extra_ldflags or ())],
            extra_include_paths=[*include_paths(), *(extra_include_paths or ())],
            build_directory=build_directory,
            verbose=verbose,
            with_cuda=False,
            is_python_module=is_python_module,
            is_standalone=is_standalone,
            keep_intermediates=keep_intermediates,
        )
    finally:
        if old is None:
            os.environ.pop("CXX", None)
        else:
            os.environ["CXX"] = old


def __getattr__(name: str) -> Any:
    # setuptools is needed by this class only.
    if name == "DpcppBuildExtension":
        globals()[name] = _build_extension()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
