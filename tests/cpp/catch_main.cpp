// SPDX-License-Identifier: Apache-2.0
// The main program that Catch2 v2 leaves to its user.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
