// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "catch.h"
#include "core/lru_cache.h"

using ringattn::LruCache;

TEST_CASE("a cache knows what was inserted, and computes what it does not know, once") {
  LruCache<std::vector<int>, std::string> cache;
  CHECK(cache.find({1}) == nullptr);
  cache.insert({1}, "one");
  REQUIRE(cache.find({1}) != nullptr);
  CHECK(*cache.find({1}) == "one");
  int computed = 0;
  const auto compute = [&] {
    ++computed;
    return "two";
  };
  CHECK(cache.find_or_compute({1}, compute) == "one");
  CHECK(cache.find_or_compute({2}, compute) == "two");
  CHECK(cache.find_or_compute({2}, compute) == "two");
  CHECK(computed == 1);
}

TEST_CASE("a full cache replaces what was used least recently") {
  LruCache<int, int, 3> cache;
  for (const int key : {1, 2, 3}) cache.insert(key, 10 * key);
  CHECK(*cache.find(1) == 10);  // no longer the least recent one
  cache.insert(4, 40);
  CHECK(cache.find(2) == nullptr);
  CHECK(cache.find_or_compute(3, [] { return 0; }) == 30);
  cache.insert(5, 50);
  CHECK(cache.find(1) == nullptr);
  for (const int key : {3, 4, 5}) {
    REQUIRE(cache.find(key) != nullptr);
    CHECK(*cache.find(key) == 10 * key);
  }
}

TEST_CASE("a look-up moves and copies no value") {
  LruCache<int, std::vector<int>, 2> cache;
  const std::vector<int>* const first = &cache.insert(1, {1});
  cache.insert(2, {2});
  CHECK(cache.find(1) == first);
  CHECK(cache.find(2) != first);
  CHECK(cache.find(1) == first);
}

TEST_CASE("a computation that throws leaves nothing behind") {
  LruCache<int, int> cache;
  const auto fail = []() -> int { throw 7; };
  CHECK_THROWS_AS(cache.find_or_compute(1, fail), int);
  CHECK(cache.find(1) == nullptr);
}
