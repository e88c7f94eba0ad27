# SPDX-License-Identifier: Apache-2.0
# The component "xpu" of the CMake package IPEX, which finds this file: the target IPEX::xpu, the device xpu of a C++
# program (ipex/xpu/device.h). The program must be built for the torch that this package was built for.

get_filename_component(_ipex_xpu_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
file(STRINGS "${_ipex_xpu_root}/_build.py" _ipex_xpu_torch REGEX "^TORCH = ")
string(REGEX REPLACE ".*\"([0-9.]+)\".*" "\\1" _ipex_xpu_torch "${_ipex_xpu_torch}")
# The SYCL run-time lies in the folder lib of the environment.
get_filename_component(_ipex_xpu_lib "${_ipex_xpu_root}/../../.." ABSOLUTE)
set(IPEXXpu_FOUND TRUE)
if(NOT EXISTS "${_ipex_xpu_root}/libipex_xpu.so")
  set(IPEXXpu_FOUND FALSE)
  set(IPEXXpu_NOT_FOUND_MESSAGE "${_ipex_xpu_root}/libipex_xpu.so is missing: pip install --force-reinstall ipex-xpu-kernels")
elseif(Torch_VERSION AND NOT Torch_VERSION MATCHES "^${_ipex_xpu_torch}[.]")
  set(IPEXXpu_FOUND FALSE)
  set(IPEXXpu_NOT_FOUND_MESSAGE
    "ipex-xpu-kernels was built for torch ${_ipex_xpu_torch}, but torch ${Torch_VERSION} was found: install the wheel for it")
elseif(NOT TARGET IPEX::xpu)
  add_library(IPEX::xpu_core SHARED IMPORTED)
  set_target_properties(IPEX::xpu_core PROPERTIES IMPORTED_LOCATION "${_ipex_xpu_root}/libipex_xpu_core.so")
  add_library(IPEX::xpu SHARED IMPORTED)
  set_target_properties(IPEX::xpu PROPERTIES
    IMPORTED_LOCATION "${_ipex_xpu_root}/libipex_xpu.so"
    IMPORTED_LINK_DEPENDENT_LIBRARIES IPEX::xpu_core
    INTERFACE_INCLUDE_DIRECTORIES "${_ipex_xpu_root}/include"
    # Libraries of the run-time that it loads itself are looked for along the run path of the program.
    INTERFACE_LINK_OPTIONS "LINKER:-rpath,${_ipex_xpu_lib},-rpath-link,${_ipex_xpu_lib}"
    INTERFACE_LINK_LIBRARIES "${TORCH_LIBRARIES}")
endif()
unset(_ipex_xpu_root)
unset(_ipex_xpu_torch)
unset(_ipex_xpu_lib)
