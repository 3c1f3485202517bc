// SPDX-License-Identifier: Apache-2.0
#include <sstream>

#include "skipped_tests.h"

TEST_CASE("one line says how many tests need a GPU, sections are no tests") {
  std::ostringstream out;
  {
    SkippedTests skipped(out);
    for (int section = 0; section < 3; ++section) skipped.add();
    CHECK(out.str().empty());
  }
  CHECK(out.str() == "1 tests need a GPU that is not here: skipped\n");
  { SkippedTests none(out); }
  CHECK(out.str().size() == std::string("1 tests need a GPU that is not here: skipped\n").size());
}
