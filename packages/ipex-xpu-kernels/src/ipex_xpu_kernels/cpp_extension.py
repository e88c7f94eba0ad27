# SPDX-License-Identifier: Apache-2.0
"""``torch.xpu.cpp_extension``: C++ extensions with SYCL kernels.

Sources ``NAME.sycl`` hold kernels as for ``ipex.xpu.load_inline``. Their text becomes a part of the extension, and the
compiler of the SYCL run-time translates it when a kernel is first started (``ipex/xpu/program.h``). The other sources
are compiled by icpx of the oneAPI toolkit, where it is installed, and may start kernels in SYCL's other ways; without
it the C++ compiler of the system does, which knows no kernels. They reach the queue of a stream by
``ipex::xpu::current_queue(device)``, or by ``torch.xpu.current_stream().sycl_queue``, its address.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from setuptools import Extension
    from torch.utils.cpp_extension import BuildExtension as DpcppBuildExtension

__all__ = [
    "DPCPPExtension",
    "DpcppBuildExtension",
    "SyclExtension",
    "include_paths",
    "library_paths",
    "load",
]

_FLAGS = ["-fsycl", "-fPIC", "-std=c++20"]
_PACKAGE = Path(__file__).parent
_LIBRARIES = ("-l:libipex_xpu.so", "-l:libipex_xpu_core.so", "-l:libsycl.so.9")


def compiler() -> str | None:
    """Return the path of icpx; None if it is neither on the path, nor in ``CMPLR_ROOT``, nor named by ``CXX``."""
    root = os.environ.get("CMPLR_ROOT")
    named = os.environ.get("CXX", "")
    candidates = [named if Path(named).name in ("icpx", "dpcpp") else "", "icpx"]
    if root:
        candidates.append(str(Path(root) / "bin" / "icpx"))
    for candidate in candidates:
        found = shutil.which(candidate) if candidate else None
        if found:
            return found
    return None


def _prepared(sources: Sequence[str], folder: Path, icpx: str | None) -> list[str]:
    """Return the sources for a C++ compiler: files in ``folder`` that hold the text, in the place of ``*.sycl``.

    Raises:
        RuntimeError: A source starts kernels that only icpx translates, which is not there.
    """
    found = []
    for source in map(Path, sources):
        text = source.read_text(encoding="utf-8")
        if source.suffix == ".sycl":
            name = re.sub(r"\W", "_", source.stem)
            folder.mkdir(parents=True, exist_ok=True)
            made = folder / f"{name}.sycl.cpp"
            content = "".join(f"{byte}," for byte in text.encode())
            made.write_text(
                f'extern "C" const char ipex_sycl_{name}[];\nconst char ipex_sycl_{name}[] = {{{content}0}};\n',
                encoding="utf-8",
            )
            found.append(str(made))
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if icpx is None and re.search(
                r"\b(parallel_for|single_task)\b", line.partition("//")[0]
            ):
                raise RuntimeError(
                    f"{source}:{number}: kernels in a C++ source are translated by icpx only, which was not found: move"
                    " them to a source NAME.sycl (see ipex/xpu/program.h), or install the oneAPI toolkit and source its"
                    " setvars.sh, or set CMPLR_ROOT or CXX"
                )
        found.append(str(source))
    return found


def include_paths() -> list[str]:
    """Return the folders of headers that an extension needs: of torch, the SYCL run-time and this package."""
    from torch.utils import cpp_extension

    paths: list[str] = [*cpp_extension.include_paths(), str(_PACKAGE / "include")]
    root = os.environ.get("CMPLR_ROOT")
    header = "include/sycl/sycl.hpp"
    for folder in (Path(root) / "include" if root else None, _installed(header, 2)):
        if folder is not None and (folder / "sycl" / "sycl.hpp").exists():
            paths.append(str(folder))
            break
    return paths


def _installed(name: str, levels: int) -> Path | None:
    """Return the folder that is so many levels above a file of the package of the SYCL run-time; None without it."""
    try:
        files = importlib.metadata.files("intel-sycl-rt") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.as_posix().endswith(name):
            return Path(str(file.locate())).resolve().parents[levels - 1]
    return None


def library_paths() -> list[str]:
    """Return the folders of libraries that an extension needs: of torch, the SYCL run-time and this package."""
    from torch.utils import cpp_extension

    paths: list[str] = [*cpp_extension.library_paths(), str(_PACKAGE)]
    root = os.environ.get("CMPLR_ROOT")
    for folder in (Path(root) / "lib" if root else None, _installed("/libsycl.so.9", 1)):
        if folder is not None and any(folder.glob("libsycl.so*")):
            paths.append(str(folder))
            break
    return paths


def DPCPPExtension(name: str, sources: Sequence[str], *args: Any, **kwargs: Any) -> Extension:
    """Return a ``setuptools.Extension`` for C++ and SYCL sources.

    Args:
        name: Of the module.
        sources: C++ files, and files ``*.sycl`` of kernels.
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
    kwargs["extra_link_args"] = ["-fsycl", *_LIBRARIES, *kwargs.get("extra_link_args", [])]
    kwargs["include_dirs"] = [*include_paths(), *kwargs.get("include_dirs", [])]
    kwargs["library_dirs"] = [*library_paths(), *kwargs.get("library_dirs", [])]
    extension: Extension = cpp_extension.CppExtension(name, list(sources), *args, **kwargs)
    return extension


#: What torch calls it.
SyclExtension = DPCPPExtension


def _build_extension() -> Any:
    from torch.utils import cpp_extension

    class DpcppBuildExtension(cpp_extension.BuildExtension):  # type: ignore[misc]
        """``build_ext`` for `DPCPPExtension`; ``with_options(use_ninja=..., no_python_abi_suffix=...)``."""

        def build_extensions(self) -> None:
            icpx = compiler()
            for extension in self.extensions:
                folder = Path(self.build_temp) / extension.name
                extension.sources = _prepared(extension.sources, folder, icpx)
                if icpx is None:
                    flags = extension.extra_compile_args["cxx"]
                    extension.extra_compile_args["cxx"] = [f for f in flags if f != "-fsycl"]
                    flags = extension.extra_link_args
                    extension.extra_link_args = [f for f in flags if f != "-fsycl"]
            if icpx is None:
                super().build_extensions()
                return
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
    """Compile sources and load the module.

    Args:
        name: Of the module.
        sources: C++ files, and files ``*.sycl`` of kernels.
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
        RuntimeError: The sources do not compile, or have kernels that need icpx, which is not there.
    """
    from torch.utils import cpp_extension

    icpx = compiler()
    folder = Path(build_directory or cpp_extension._get_build_directory(name, verbose))
    files = _prepared([sources] if isinstance(sources, str) else list(sources), folder, icpx)
    flags = [flag for flag in _FLAGS if icpx or flag != "-fsycl"]
    old = os.environ.get("CXX")
    if icpx:
        os.environ["CXX"] = icpx
    try:
        return cpp_extension.load(
            name,
            files,
            extra_cflags=[*flags, *(extra_cflags or ())],
            extra_ldflags=[
                *(["-fsycl"] if icpx else []),
                *(f"-L{p}" for p in library_paths()),
                *_LIBRARIES,
                *(extra_ldflags or ()),
            ],
            extra_include_paths=[*include_paths(), *(extra_include_paths or ())],
            build_directory=str(folder),
            verbose=verbose,
            with_cuda=False,
            is_python_module=is_python_module,
            is_standalone=is_standalone,
            keep_intermediates=keep_intermediates,
        )
    finally:
        if icpx is None:
            pass
        elif old is None:
            os.environ.pop("CXX", None)
        else:
            os.environ["CXX"] = old


def __getattr__(name: str) -> Any:
    # setuptools is needed by this class only.
    if name == "DpcppBuildExtension":
        globals()[name] = _build_extension()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
