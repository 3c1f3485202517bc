// SPDX-License-Identifier: Apache-2.0
#pragma once

// Catch2 v3 has one header for everything, v2 another.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
