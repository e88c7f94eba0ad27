#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# bundle.sh ADAPTER KERNELS FOLDER [CACHE]: fills FOLDER with what a machine with a CUDA GPU, torch, pybind11 and
# scikit-build-core but no network needs to run the tests of ipex-xpu-kernels: the SYCL run-time of the wheels (45 MB
# packed), ADAPTER (of adapter.sh), KERNELS (the folder `kernels` of an installed ipex-xpu-kernels), and the sources of
# the packages that the tests use. CACHE, a folder of prebuild.py, saves the compilation of the kernels there.
# FOLDER/run.sh does the rest there.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
adapter=$(realpath "$1") kernels=$(realpath "$2") folder=$(mkdir -p "$3" && cd "$3" && pwd)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
pip download -q --no-deps -d "$work" intel-sycl-rt==2026.1.2 intel-cmplr-lib-ur==2026.1.2 intel-cmplr-lib-rt==2026.1.2 \
  umf tcmlib 'nvidia-cuda-nvcc-cu12==12.8.*'
for wheel in "$work"/*.whl; do unzip -q -n "$wheel" -d "$work/unpacked"; done
data=$work/unpacked/intel_sycl_rt-2026.1.2.data/data
find_file() { find "$work/unpacked" -name "$1" | head -1; }
rm -rf "$folder"/*; mkdir -p "$folder"/{lib,libclc,cuda/bin,cuda/include,cuda/nvvm/libdevice}
for name in libsycl.so.9 libsycl-jit.so libimf.so libirng.so libintlc.so.5 libur_loader.so.0 libumf.so.1 libhwloc.so.15; do
  cp -L "$(find_file "$name")" "$folder/lib/"
done
cp "$adapter" "$folder/lib/libur_adapter_cuda.so.0"
strip --strip-unneeded "$folder"/lib/{libsycl-jit.so,libur_loader.so.0,libumf.so.1,libhwloc.so.15}
# The run-time links a library of vector functions and calls none of them.
echo 'int none_(void) { return 0; }' | gcc -shared -fPIC -x c - -Wl,-soname,libsvml.so -o "$folder/lib/libsvml.so"
python3 "$here/extract.py" "$data/lib/libsycl-jit.so" remangled-l64-signed_char.libspirv-nvptx64 "$folder/libclc"
# The compiler takes the folder above a program named ptxas for CUDA's.
cp "$(find_file libdevice.10.bc)" "$folder/cuda/nvvm/libdevice/"
echo '#define CUDA_VERSION 12080' > "$folder/cuda/include/cuda.h"
printf '#!/bin/sh\nexit 1\n' > "$folder/cuda/bin/ptxas"; chmod +x "$folder/cuda/bin/ptxas"
gcc -O1 -w -shared -fPIC "$here/preload.c" -o "$folder/lib/preload.so" -ldl
cp "$here"/{run.sh,whole.sh,compile.py,hide_cuda.cpp} "$folder/"
tar cJf "$folder/include.tar.xz" -C "$data" include
tar cJf "$folder/kernels.tar.xz" -C "$kernels" $(cd "$kernels" && ls ./*.txt)
if [ -n "${4:-}" ]; then tar cJf "$folder/cache.tar.xz" -C "$4" .; fi
(cd "$here/../.." && git archive HEAD packages/ipex-core packages/ipex-xpu-kernels packages/ipex-llm/src \
  packages/ipex-quant/src) | xz > "$folder/source.tar.xz"
xz -T0 -6 "$folder"/lib/{libsycl-jit.so,libsycl.so.9,libur_loader.so.0,libimf.so} "$folder"/libclc/*.bc
du -sh "$folder"
