// SPDX-License-Identifier: Apache-2.0
#pragma once

// The libraries are built with hidden visibility. The mark exports what the C++ tests and the
// Python module call, and what libringattn calls in libringattn_kernels.
#define RINGATTN_API __attribute__((visibility("default")))
