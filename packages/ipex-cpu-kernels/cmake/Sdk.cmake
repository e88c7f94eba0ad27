# SPDX-License-Identifier: Apache-2.0
# The C++ SDK: libipex_cpp.so, headers and the CMake package IPEX. It is put together in the build folder, which can be
# used in place, and installed from there.
include(CMakePackageConfigHelpers)

file(GLOB _cpp_sources CONFIGURE_DEPENDS csrc/cpp/*.cpp)
add_library(ipex_cpp SHARED ${_cpp_sources} csrc/runtime/baseline.cpp)
target_include_directories(ipex_cpp PRIVATE csrc csrc/include)
target_include_directories(ipex_cpp SYSTEM PRIVATE ${TORCH_INCLUDE_DIR})
target_compile_definitions(ipex_cpp PRIVATE TORCH_TARGET_VERSION=0x020b000000000000)
target_compile_options(ipex_cpp PRIVATE
  $<$<CONFIG:Release>:-O2> -ffile-prefix-map=${TORCH_INCLUDE_DIR}=torch/include)
target_link_options(ipex_cpp PRIVATE
  -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/cmake/cpp.map -Wl,-z,noexecstack -Wl,--no-as-needed)
target_link_directories(ipex_cpp PRIVATE ${TORCH_LIBRARY_DIR} ${CMAKE_CURRENT_BINARY_DIR})
# A module cannot be linked by its target.
add_dependencies(ipex_cpp ipex_cpu)
target_link_libraries(ipex_cpp PRIVATE -l:libipex_cpu.so torch_cpu)
set_target_properties(ipex_cpp PROPERTIES
  LINK_DEPENDS "${CMAKE_CURRENT_BINARY_DIR}/libipex_cpu.so;${CMAKE_CURRENT_SOURCE_DIR}/cmake/cpp.map"
  BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
install(TARGETS ipex_cpp LIBRARY DESTINATION lib)

# Headers that declare C functions and kernels, and what they include; those in ipex/torch need torch. Left out are
# those in ipex/kernel, which need the flags of one ISA level, and in ipex/glue.
set(_sdk ${CMAKE_CURRENT_BINARY_DIR})
file(GLOB _headers RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/csrc/include CONFIGURE_DEPENDS
  csrc/include/ipex/*.h csrc/include/ipex/torch/*.h)
foreach(_header IN LISTS _headers)
  configure_file(csrc/include/${_header} ${_sdk}/include/${_header} COPYONLY)
endforeach()
file(GLOB _headers RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/csrc/ops CONFIGURE_DEPENDS csrc/ops/*/*.h)
foreach(_header IN LISTS _headers)
  file(STRINGS csrc/ops/${_header} _declares REGEX "IPEX_KERNEL_API")
  if(_declares OR _header MATCHES "/(packed|woq_format)\\.h$")
    configure_file(csrc/ops/${_header} ${_sdk}/include/ipex/ops/${_header} COPYONLY)
  endif()
endforeach()
install(DIRECTORY ${_sdk}/include DESTINATION .)

file(STRINGS src/ipex_cpu_kernels/_version.py _version REGEX "^__version__")
string(REGEX REPLACE ".*\"([0-9.]+).*" "\\1" _version "${_version}")
configure_file(cmake/IPEXConfig.cmake ${_sdk}/share/cmake/IPEX/IPEXConfig.cmake COPYONLY)
write_basic_package_version_file(${_sdk}/share/cmake/IPEX/IPEXConfigVersion.cmake
  VERSION "${_version}" COMPATIBILITY SameMinorVersion)
install(DIRECTORY ${_sdk}/share DESTINATION .)
