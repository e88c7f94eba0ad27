#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# prebuild.sh ADAPTER PACKAGE CACHE: compiles the kernels of PACKAGE, an installed ipex-xpu-kernels, for a CUDA GPU on a
# machine that has none, into the folder CACHE for bundle.sh. It also tells whether all of them compile. ADAPTER is of
# adapter.sh; CUDA_HOME (/usr/local/cuda) has the device library libdevice.10.bc.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
adapter=$(realpath "$1") package=$(realpath "$2") cache=$(mkdir -p "$3" && cd "$3" && pwd)
libraries=$(python3 -c 'import importlib.metadata as m; print(next(f.locate().resolve().parent for f in m.files("intel-sycl-rt") if f.name == "libsycl.so.9"))')
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lib,cuda/bin,cuda/include,cuda/nvvm/libdevice}
# The adapter finds these instead of the libraries of a driver. UMF asks for some functions by their names.
nm -D "$adapter" | awk '$1 == "U" {print $2}' > "$work/undefined"
printf '%s\n' cuMemAlloc_v2 cuMemHostAlloc cuMemAllocHost_v2 cuMemAllocManaged cuMemFreeHost cuIpcGetMemHandle \
  cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle cuCtxGetDevice >> "$work/undefined"
grep -E '^cu[A-Z]' "$work/undefined" | sort -u | while read -r name; do
  grep -q "int $name(" "$here/driver.c" || echo "int $name(void) { return 0; }"
done > "$work/rest.c"
grep -E '^nvml[A-Z]' "$work/undefined" | sed 's/.*/int &(void) { return 999; }/' > "$work/nvml.c"
gcc -w -shared -fPIC -Wl,-soname,libcuda.so.1 "$here/driver.c" "$work/rest.c" -o "$work/lib/libcuda.so.1"
gcc -w -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 "$work/nvml.c" -o "$work/lib/libnvidia-ml.so.1"
gcc -O1 -w -shared -fPIC "$here/preload.c" -o "$work/lib/preload.so" -ldl
cp "$adapter" "$work/lib/libur_adapter_cuda.so.0"
python3 "$here/extract.py" "$libraries/libsycl-jit.so" remangled-l64-signed_char.libspirv-nvptx64 "$work/libclc" > /dev/null
cp "${CUDA_HOME:-/usr/local/cuda}/nvvm/libdevice/libdevice.10.bc" "$work/cuda/nvvm/libdevice/"
echo '#define CUDA_VERSION 12080' > "$work/cuda/include/cuda.h"
printf '#!/bin/sh\nexit 1\n' > "$work/cuda/bin/ptxas"; chmod +x "$work/cuda/bin/ptxas"
g++ -std=c++20 -O1 -w -I"$here/../../packages/ipex-xpu-kernels/csrc" -isystem "$libraries/../include" "$here/prebuild.cpp" \
  -o "$work/prebuild" "$package/libipex_xpu_core.so" "$libraries/libsycl.so.9" -Wl,-rpath,"$package:$libraries"
export LD_LIBRARY_PATH=$work/lib:$libraries PATH=$work/cuda/bin:$PATH SYCL_LIBCLC_DIR=$work/libclc
export ONEAPI_DEVICE_SELECTOR=cuda:* SYCL_JIT_AMDGCN_PTX_TARGET_CPU=${IPEX_PTX_TARGET:-sm_90}
LD_PRELOAD=$work/lib/preload.so "$work/prebuild" "$package/kernels" "$cache"
