# SPDX-License-Identifier: Apache-2.0
# Which ISA levels a build has.

# Set `out` to the names of the levels that `wanted` asks for, lowest first.
#
# `wanted` is a list of names, separated by ',' or ';'. Empty means all levels. "native" means the default level and
# the highest one that this CPU can run: what a build for the machine itself needs. A release has all levels.
function(ipex_select_levels out wanted)
  string(REPLACE "," ";" wanted "${wanted}")
  set(all "")
  foreach(row IN LISTS IPEX_ISA_TABLE)
    string(REGEX REPLACE "\\|.*" "" name "${row}")
    list(APPEND all "${name}")
  endforeach()
  if(NOT wanted)
    set(wanted ${all})
  elseif("native" IN_LIST wanted)
    ipex_native_level(native reason)
    message(STATUS "Highest ISA level of this CPU: ${native} (${reason})")
    list(REMOVE_ITEM wanted native)
    list(APPEND wanted default ${native})
  endif()
  foreach(name IN LISTS wanted)
    if(NOT name IN_LIST all)
      list(JOIN all ", " names)
      message(FATAL_ERROR "IPEX_ISA_LEVELS: expected 'native' or levels among ${names}, got '${name}'")
    endif()
  endforeach()
  set(selected "")
  foreach(name IN LISTS all)
    if(name IN_LIST wanted)
      list(APPEND selected ${name})
    endif()
  endforeach()
  list(JOIN selected ", " names)
  message(STATUS "ISA levels of this build: ${names}")
  set(${out} "${selected}" PARENT_SCOPE)
endfunction()

# Set `level` to the highest level that this CPU can run and `reason` to why it is no higher one.
function(ipex_native_level level reason)
  set(rows "")
  foreach(row IN LISTS IPEX_ISA_TABLE)
    string(REGEX MATCH "^([a-z0-9_]+)\\|([^|]*)" _ "${row}")
    string(REPLACE "+" " | " bits "${CMAKE_MATCH_2}")
    string(APPEND rows "{\"${CMAKE_MATCH_1}\", ${bits}},\n")
  endforeach()
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/native_level)
  file(CONFIGURE OUTPUT ${folder}/isa_levels.inc CONTENT "${rows}" @ONLY)
  # The features are read as the library reads them at run time, so that both mean the same by a level.
  try_run(code compiled ${folder} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/native_level.cpp
    CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${folder};${CMAKE_CURRENT_SOURCE_DIR}/csrc"
    CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON
    COMPILE_OUTPUT_VARIABLE log RUN_OUTPUT_VARIABLE printed)
  if(NOT compiled OR NOT code EQUAL 0)
    message(FATAL_ERROR "IPEX_ISA_LEVELS=native: cannot ask this CPU for its features; name the levels instead.\n${log}")
  endif()
  string(REGEX MATCH "^([a-z0-9_]+)\n(.*)$" _ "${printed}")
  set(${level} "${CMAKE_MATCH_1}" PARENT_SCOPE)
  set(${reason} "${CMAKE_MATCH_2}" PARENT_SCOPE)
endfunction()
