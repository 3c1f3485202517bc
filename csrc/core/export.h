// SPDX-License-Identifier: Apache-2.0
#pragma once

// The library is built with hidden visibility; what the C++ tests and the Python module call is
// marked.
#define RINGATTN_API __attribute__((visibility("default")))
