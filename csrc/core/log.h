// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "core/export.h"

namespace ringattn {

/// Lines about what the package does, for people. They go to stderr, or to a sink where one is
/// installed (the Python package installs its logger). Thread-safe.
enum class LogLevel { kInfo, kWarning };

/// Whether lines of level kInfo are wanted: RINGATTN_LOG=info.
RINGATTN_API bool logs_info();

/// Hands over one line and returns at once. A thread of its own calls the sink, so that a sink that
/// waits for an interpreter never holds up the caller.
RINGATTN_API void log(LogLevel level, const std::string& line);

/// The same at level kInfo, where that is wanted and the line is new.
RINGATTN_API void log_info_once(const char* line);

/// From now on lines go to `sink`; null: to stderr. Returns when no earlier sink is called any
/// more.
RINGATTN_API void set_log_sink(void (*sink)(LogLevel level, const std::string& line));

}  // namespace ringattn
