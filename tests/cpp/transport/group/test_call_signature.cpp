// SPDX-License-Identifier: Apache-2.0
#include <set>
#include <vector>

#include "catch.h"
#include "transport/group/call_signature.h"

using ringattn::Signature;

TEST_CASE("a signature's text has every value, in order") {
  const std::vector<int64_t> lengths = {3, 0, 5};
  const std::string layout = "zigzag";
  const Signature signature = Signature("ring_forward")
                                  .add("lengths", lengths)
                                  .add("layout", layout)
                                  .add("dtype", "Half")
                                  .add("batch size", int64_t{2})
                                  .add("causal", true)
                                  .add("scale", 0.1)
                                  .add("nothing", std::vector<int64_t>{})
                                  .add_lines("one=1\ntwo=[2]\n")
                                  .add("last", int64_t{3});
  CHECK(signature.operation() == std::string("ring_forward"));
  CHECK(signature.text() ==
        "operator=ring_forward\nlengths=[3, 0, 5]\nlayout=zigzag\ndtype=Half\nbatch size=2\n"
        "causal=True\nscale=0.10000000000000001\nnothing=[]\none=1\ntwo=[2]\nlast=3\n");
}

TEST_CASE("signatures have one key if and only if they say the same") {
  const char* const names[] = {"a", "b"};
  const auto of = [&](const char* operation, const std::vector<int64_t>& a,
                      const std::vector<int64_t>& b, double scale) {
    return Signature(operation).add(names[0], a).add(names[1], b).add("scale", scale).key();
  };
  CHECK(of("x", {1, 2}, {3}, 1.0) == of("x", {1, 2}, {3}, 1.0));
  const std::set<std::string> keys = {of("x", {1, 2}, {3}, 1.0), of("x", {1}, {2, 3}, 1.0),
                                      of("x", {}, {1, 2, 3}, 1.0), of("x", {1, 2}, {3}, 2.0),
                                      of("y", {1, 2}, {3}, 1.0)};
  CHECK(keys.size() == 5);
}
