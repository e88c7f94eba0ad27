#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# adapter.sh CLONE FOLDER: builds libur_adapter_cuda.so.0 for intel-sycl-rt 2026.1.2 into FOLDER, from a clone of
# oneapi-src/unified-runtime. The wheel has the loader that looks for this file, but not the file. Needs g++ 12 or
# later, git, pip and unzip; JOBS files are compiled at a time (2).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
clone=${1:?a clone of oneapi-src/unified-runtime} folder=$(mkdir -p "${2:?a folder}" && cd "$2" && pwd)
commit=9018ebf2a                                            # the last whose tables have the order of the wheel
later="61f51bf04 438253590 5bf00b825 d35eb8977 219a74be1"   # mends of the adapter made after it
work=$folder/build
rm -rf "$work"; mkdir -p "$work"/{wheels,unpacked,cuda,include,objects,source,stubs}; cd "$work"
pip download -q --no-deps -d wheels intel-sycl-rt==2026.1.2 umf tcmlib 'nvidia-cuda-runtime-cu12==12.8.*' nvidia-nvml-dev-cu12
for wheel in wheels/intel_*.whl wheels/umf*.whl wheels/tcmlib*.whl; do unzip -q -n "$wheel" -d unpacked; done
for wheel in wheels/nvidia_*.whl; do unzip -q -n "$wheel" 'nvidia/*include*' -d cuda; done
git -C "$clone" archive $commit source include | tar x -C source
for one in $later; do
  git -C "$clone" show --format= $one -- source/adapters/cuda | patch -s -p1 -d source
done
# Programs from PTX that was compiled earlier: what the package keeps of kernels, and bundle.sh brings along.
patch -s -p1 -d source < "$here/adapter.patch"
cp -r unpacked/intel_sycl_rt-2026.1.2.data/data/include/unified-runtime include/
cp -r unpacked/umf-*.data/data/include/umf unpacked/umf-*.data/data/include/umf.h include/
top=source/source cuda=source/source/adapters/cuda
# Entry points of the wheel's tables that the commit lacks. The adapter does not support them in later commits either.
add() {  # NAME OF THE TABLE'S FIELD, NAME OF THE FUNCTION, ITS PARAMETERS, THE FIELD AFTER WHICH IT IS SET
  echo "UR_APIEXPORT ur_result_t UR_APICALL $2($3) { return UR_RESULT_ERROR_UNSUPPORTED_FEATURE; }" >> $cuda/graph.cpp
  sed -i "s|^\( *\)pDdiTable->$4 = .*;|&\n\1pDdiTable->$1 = $2;|" $cuda/ur_interface_loader.cpp
}
add pfnGetIdExp urGraphGetIdExp 'ur_exp_graph_handle_t, uint64_t *' pfnDumpContentsExp
add pfnSetDestructionCallbackExp urGraphSetDestructionCallbackExp \
  'ur_exp_graph_handle_t, ur_exp_graph_destruction_callback_t, void *' pfnDumpContentsExp
add pfnGetNativeHandleExp urGraphGetNativeHandleExp 'ur_exp_graph_handle_t, ur_native_handle_t *' pfnDumpContentsExp
add pfnGetGraphExp urQueueGetGraphExp 'ur_queue_handle_t, ur_exp_graph_handle_t *' pfnBeginGraphCaptureExp
sources="$cuda/*.cpp $top/ur/ur.cpp $top/common/ur_util.cpp $top/common/logger/ur_logger.cpp
  $top/common/offload_bundle_parser.cpp $top/common/linux/ur_lib_loader.cpp
  $top/common/umf_pools/disjoint_pool_config_parser.cpp $top/common/backtrace_lin.cpp"
compile() {
  g++ -std=c++17 -O2 -fPIC -pthread -fvisibility=hidden -w -DNDEBUG '-DUR_VERSION="0"' \
    '-DUR_VALIDATION_LAYER_SUPPORTED_VERSION="0"' -Iinclude -Iinclude/unified-runtime -Isource/source \
    -Isource/source/common -Isource/source/adapters/cuda -isystem cuda/nvidia/cuda_runtime/include \
    -isystem cuda/nvidia/nvml_dev/include -c "$1" -o "objects/$(echo "$1" | tr / _).o"
}
export -f compile
ls $sources | xargs -P "${JOBS:-2}" -I{} bash -c 'compile {} || exit 255'
# The libraries of the driver come with the driver; here only their names are needed.
nm -u objects/*.o | awk '$1 == "U" {print $2}' | sort -u > undefined
for library in cuda:libcuda.so:^cu[A-Z] nvml:libnvidia-ml.so:^nvml[A-Z]; do
  IFS=: read -r name file pattern <<< "$library"
  grep -E "$pattern" undefined | sed 's/.*/void &(void) {}/' > stubs/$name.c
  gcc -shared -fPIC -Wl,-soname,$file.1 stubs/$name.c -o stubs/$file
done
sed 's/@TARGET_LIBNAME@/LIBUR_ADAPTER_CUDA_0.0/' $top/adapters/adapter.map.in > adapter.map
g++ -shared -o "$folder/libur_adapter_cuda.so.0" objects/*.o -Wl,-soname,libur_adapter_cuda.so.0 \
  -Wl,--version-script=adapter.map -Wl,-z,defs -Lstubs -lcuda -lnvidia-ml -L"$(echo unpacked/umf-*.data/data/lib)" -lumf \
  -Wl,-rpath-link,"$(echo unpacked/tcmlib-*.data/data/lib)" -ldl -lpthread -Wl,-rpath,'$ORIGIN' -Wl,-s \
  -static-libstdc++ -static-libgcc
