# SPDX-License-Identifier: Apache-2.0
# Kernels and op schemas of ipex for C++ programs. Needs torch's CMake package on CMAKE_PREFIX_PATH as well.
#
#   find_package(IPEX REQUIRED)
#   target_link_libraries(program PRIVATE "${TORCH_IPEX_LIBRARIES}")
#
# Variables:
#   IPEX_FOUND
#   IPEX_LIBRARIES, IPEX_INCLUDE_DIRS              of ipex
#   TORCH_IPEX_LIBRARIES, TORCH_IPEX_INCLUDE_DIRS  of ipex and torch
#   TORCH_IPEX_CXX_FLAGS                           what torch wants its users compiled with
#   IPEX_WITH_CPU, IPEX_WITH_XPU                   ON or OFF
# Targets:
#   IPEX::ipex         the library, linked even where the program names none of its symbols; also intel-ext-pt-cpu
#   IPEX::cpu_kernels  libipex_cpu.so, for programs that call the C functions of ipex/c_api.h
#   IPEX::xpu          the device xpu (ipex/xpu/device.h), with the component "xpu"; then also in IPEX_LIBRARIES
# The environment variable IPEX_INSTALL_PREFIX names another installation. The components are "cpu" and "xpu", which the
# package ipex-xpu-kernels has.

include(CMakeFindDependencyMacro)
find_dependency(Torch)

set(IPEX_WITH_XPU OFF)
foreach(_component IN LISTS IPEX_FIND_COMPONENTS)
  set(IPEX_${_component}_FOUND FALSE)
  set(_why "there is no component ${_component}, the components are: cpu, xpu")
  if(_component STREQUAL "cpu")
    set(IPEX_cpu_FOUND TRUE)
  elseif(_component STREQUAL "xpu")
    # Beside this package in site-packages, or wherever CMAKE_PREFIX_PATH says.
    find_package(IPEXXpu CONFIG QUIET HINTS "${CMAKE_CURRENT_LIST_DIR}/../../../../ipex_xpu_kernels/share/cmake")
    set(IPEX_xpu_FOUND ${IPEXXpu_FOUND})
    set(IPEX_WITH_XPU ${IPEXXpu_FOUND})
    set(_why "${IPEXXpu_NOT_FOUND_MESSAGE}")
    if(NOT IPEXXpu_CONSIDERED_CONFIGS)
      set(_why "the component xpu is in the package ipex-xpu-kernels: pip install ipex-xpu-kernels")
    endif()
  endif()
  if(IPEX_FIND_REQUIRED_${_component} AND NOT IPEX_${_component}_FOUND)
    set(IPEX_FOUND FALSE)
    set(IPEX_NOT_FOUND_MESSAGE "${_why}")
    return()
  endif()
endforeach()
unset(_component)
unset(_why)

if(DEFINED ENV{IPEX_INSTALL_PREFIX})
  get_filename_component(_ipex_root "$ENV{IPEX_INSTALL_PREFIX}" ABSOLUTE)
else()
  get_filename_component(_ipex_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
endif()
# A build tree has no folder lib.
set(_ipex_lib "${_ipex_root}/lib")
if(NOT EXISTS "${_ipex_lib}/libipex_cpp.so")
  set(_ipex_lib "${_ipex_root}")
endif()
foreach(_file libipex_cpp.so libipex_cpu.so)
  if(NOT EXISTS "${_ipex_lib}/${_file}")
    set(IPEX_FOUND FALSE)
    set(IPEX_NOT_FOUND_MESSAGE "${_ipex_lib}/${_file} is missing: pip install --force-reinstall ipex-cpu-kernels")
    return()
  endif()
endforeach()

set(IPEX_WITH_CPU ON)
set(IPEX_INCLUDE_DIRS "${_ipex_root}/include" "${_ipex_root}/include/ipex/ops")
set(IPEX_LIBRARIES IPEX::ipex)
if(IPEX_WITH_XPU)
  list(APPEND IPEX_LIBRARIES IPEX::xpu)
endif()
set(TORCH_IPEX_LIBRARIES ${TORCH_LIBRARIES} ${IPEX_LIBRARIES})
set(TORCH_IPEX_INCLUDE_DIRS ${TORCH_INCLUDE_DIRS} ${IPEX_INCLUDE_DIRS})
set(TORCH_IPEX_CXX_FLAGS "${TORCH_CXX_FLAGS}")

if(NOT TARGET IPEX::ipex)
  add_library(IPEX::cpu_kernels SHARED IMPORTED)
  set_target_properties(IPEX::cpu_kernels PROPERTIES
    IMPORTED_LOCATION "${_ipex_lib}/libipex_cpu.so"
    INTERFACE_INCLUDE_DIRECTORIES "${IPEX_INCLUDE_DIRS}"
    # It needs libtorch_cpu.so, which only the program's run path finds.
    INTERFACE_LINK_LIBRARIES "${TORCH_LIBRARIES}")
  add_library(IPEX::registration SHARED IMPORTED)
  set_target_properties(IPEX::registration PROPERTIES
    IMPORTED_LOCATION "${_ipex_lib}/libipex_cpp.so"
    IMPORTED_LINK_DEPENDENT_LIBRARIES IPEX::cpu_kernels
    INTERFACE_INCLUDE_DIRECTORIES "${IPEX_INCLUDE_DIRS}")
  # Programs name no symbol of the library, so the linker would leave it out. The target beside the options makes CMake
  # add the folder to the run path.
  add_library(IPEX::ipex INTERFACE IMPORTED)
  set_target_properties(IPEX::ipex PROPERTIES INTERFACE_LINK_LIBRARIES
    "-Wl,--no-as-needed,\"${_ipex_lib}/libipex_cpp.so\",--as-needed;IPEX::registration;IPEX::cpu_kernels;${TORCH_LIBRARIES}")
  # The name of the target in Intel's package.
  add_library(intel-ext-pt-cpu INTERFACE IMPORTED)
  set_target_properties(intel-ext-pt-cpu PROPERTIES INTERFACE_LINK_LIBRARIES IPEX::ipex)
endif()

unset(_file)
unset(_ipex_lib)
unset(_ipex_root)
set(IPEX_FOUND TRUE)
