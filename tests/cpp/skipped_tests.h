// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <iostream>
#include <set>
#include <string>

#include "catch.h"

/// Tests that skip themselves for want of a GPU. One line at the end of the run says how many.
class SkippedTests {
 public:
  explicit SkippedTests(std::ostream& out) : out_(out) {}
  ~SkippedTests() {
    if (!names_.empty()) out_ << names_.size() << " tests need a GPU that is not here: skipped\n";
  }

  /// The test that runs; each counts once, whatever its sections.
  void add() { names_.insert(Catch::getResultCapture().getCurrentTestName()); }

 private:
  std::ostream& out_;
  std::set<std::string> names_;
};

inline SkippedTests skipped_tests{std::cout};
