# SPDX-License-Identifier: Apache-2.0
# Downloads the pinned source of Catch2 to build/ of this checkout unless it is there already, and
# sets catch2_archive. `cmake -P tests/cpp/catch2_source.cmake` does it without a build.
set(catch2_version 3.8.1)
set(catch2_sha256 18b3f70ac80fccc340d8c6ff0f339b2ae64944782f8d2fca2bd705cf47cadb79)
get_filename_component(catch2_archive
  "${CMAKE_CURRENT_LIST_DIR}/../../build/catch2-${catch2_version}.tar.gz" ABSOLUTE)

if(NOT EXISTS "${catch2_archive}")
  file(DOWNLOAD "https://github.com/catchorg/Catch2/archive/refs/tags/v${catch2_version}.tar.gz"
    "${catch2_archive}.part" STATUS catch2_status TIMEOUT 300 INACTIVITY_TIMEOUT 30)
  file(SHA256 "${catch2_archive}.part" catch2_received)
  if(NOT catch2_received STREQUAL catch2_sha256)
    file(REMOVE "${catch2_archive}.part")
    list(GET catch2_status 1 catch2_status)
    message(FATAL_ERROR "Catch2 must be installed (Debian, Ubuntu: apt install catch2) or its source "
      "must have SHA256 ${catch2_sha256}, got ${catch2_received} (${catch2_status})")
  endif()
  file(RENAME "${catch2_archive}.part" "${catch2_archive}")
endif()
