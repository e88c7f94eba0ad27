#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# On the machine with the GPU: run.sh FOLDER COMMAND... unpacks the bundle beside it into FOLDER, builds and installs
# ipex-core and ipex-xpu-kernels there for the torch of `python3`, and runs COMMAND with the GPU as xpu. What is in
# FOLDER already is not made again.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) folder=$(mkdir -p "$1" && cd "$1" && pwd); shift
if [ ! -e "$folder/unpacked" ]; then
  cp -r "$here"/{lib,libclc,cuda} "$folder/"
  # By Python: the machine may have no xz.
  python3 - "$here" "$folder" << 'END'
import lzma, pathlib, shutil, sys, tarfile
from concurrent.futures import ThreadPoolExecutor
source, target = map(pathlib.Path, sys.argv[1:])
def unpack(file):
    if file.name.endswith(".tar.xz"):
        with tarfile.open(file) as archive:
            archive.extractall(target / file.name.removesuffix(".tar.xz"), filter="data")
        return
    with lzma.open(file) as packed, open(file.with_suffix(""), "wb") as out:
        shutil.copyfileobj(packed, out, 1 << 24)
    file.unlink()
with ThreadPoolExecutor() as pool:
    list(pool.map(unpack, [*source.glob("*.tar.xz"), *target.glob("lib/*.xz"), *target.glob("libclc/*.xz")]))
END
  touch "$folder/unpacked"
fi
site=$folder/site
if [ ! -e "$site/built" ]; then
  rm -rf "$site"
  # The build asks for the files of the distribution intel-sycl-rt.
  mkdir -p "$site/intel_sycl_rt-2026.1.2.dist-info" "$site/include" "$site/lib"
  cp -r "$folder"/include/include/. "$site/include/"
  cp "$folder/lib/libsycl.so.9" "$site/lib/"; ln -sf libsycl.so.9 "$site/lib/libsycl.so"
  printf 'Metadata-Version: 2.1\nName: intel-sycl-rt\nVersion: 2026.1.2\n' > "$site/intel_sycl_rt-2026.1.2.dist-info/METADATA"
  printf 'include/sycl/sycl.hpp,,\nlib/libsycl.so,,\nlib/libsycl.so.9,,\n' > "$site/intel_sycl_rt-2026.1.2.dist-info/RECORD"
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} LD_LIBRARY_PATH=$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  packages=$folder/source/packages
  cp -r "$packages"/*/src/ipex_{core,quant,llm} "$site/"
  cmake -S "$packages/ipex-xpu-kernels" -B "$folder/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_CXX_STANDARD_LIBRARIES=-l:libstdc++.so.6 -DPython_EXECUTABLE="$(command -v python3)" \
    -DIPEX_XPU_PREBUILT_KERNELS="$folder/kernels" > "$folder/configure.log"
  cmake --build "$folder/build" --parallel > "$folder/build.log" || { grep -m 20 -E 'error|Error' "$folder/build.log"; exit 1; }
  cp -r "$packages/ipex-xpu-kernels/src/ipex_xpu_kernels" "$site/"
  cmake --install "$folder/build" --prefix "$site/ipex_xpu_kernels" > "$folder/install.log"
  torch=$(python3 -c 'import torch; print(torch.__path__[0])')
  g++ -std=c++20 -O1 -w -shared -fPIC -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" \
    "$here/hide_cuda.cpp" -o "$site/libhide_cuda.so" -L"$torch/lib" -ltorch_cpu -lc10 -l:libstdc++.so.6
  cat > "$site/hide_cuda.py" << 'END'
import ctypes, pathlib
def hide():
    assert ctypes.CDLL(str(pathlib.Path(__file__).with_name("libhide_cuda.so"))).hide_cuda()
    import torch
    torch.cuda._is_compiled = lambda: False  # Dynamo takes one kind of accelerator
END
  # Found as an installed package is: torch loads the device by its entry point.
  mkdir -p "$site/ipex_xpu_kernels-0.dist-info"
  printf 'Metadata-Version: 2.1\nName: ipex-xpu-kernels\nVersion: 0\n' > "$site/ipex_xpu_kernels-0.dist-info/METADATA"
  printf '[torch.backends]\nhide_cuda = hide_cuda:hide\nipex_xpu = ipex_xpu_kernels._autoload:autoload\n[ipex.kernels]\nxpu = ipex_xpu_kernels:register\n[ipex.components]\nxpu = ipex_xpu_kernels\n' \
    > "$site/ipex_xpu_kernels-0.dist-info/entry_points.txt"
  mkdir -p "$site/ipex_core-0.dist-info"
  printf 'Metadata-Version: 2.1\nName: ipex-core\nVersion: 0\n' > "$site/ipex_core-0.dist-info/METADATA"
  printf '[torch_dynamo_backends]\nipex = ipex_core.compile_backend:ipex_backend\n' > "$site/ipex_core-0.dist-info/entry_points.txt"
  for name in quant llm; do
    mkdir -p "$site/ipex_$name-0.dist-info"
    printf 'Metadata-Version: 2.1\nName: ipex-%s\nVersion: 0\n' $name > "$site/ipex_$name-0.dist-info/METADATA"
  done
  touch "$site/built"
fi
case ":${PYTHONPATH:-}:" in *":$site:"*) ;; *) export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} ;; esac
export LD_LIBRARY_PATH=$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} PATH=$folder/cuda/bin:$PATH
export SYCL_LIBCLC_DIR=$folder/libclc LD_PRELOAD=$folder/lib/preload.so IPEX_XPU_DEVICE=gpu
export ONEAPI_DEVICE_SELECTOR=cuda:* SYCL_JIT_AMDGCN_PTX_TARGET_CPU=${IPEX_PTX_TARGET:-sm_90}
export IPEX_XPU_CACHE=$folder/cache  # with what bundle.sh brought along
cd "$folder/source/packages/ipex-xpu-kernels"
exec "$@"
