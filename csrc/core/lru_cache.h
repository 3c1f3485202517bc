// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <list>
#include <utility>

namespace ringattn {

/// The `kMaxEntries` latest values by key: a new one replaces the one that was used least recently.
/// A look-up compares keys one by one, the latest first, so that a repeated call finds its own at
/// once. Not thread-safe.
template <typename Key, typename Value, size_t kMaxEntries = 32>
class LruCache {
 public:
  /// The value of `key`, valid until the next insertion; null where there is none, or no more.
  const Value* find(const Key& key) {
    for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
      if (!(entry->first == key)) continue;
      if (entry != entries_.begin()) entries_.splice(entries_.begin(), entries_, entry);
      return &entry->second;
    }
    return nullptr;
  }

  /// Adds the value of a key that find() does not know. Valid as that of find().
  const Value& insert(Key key, Value value) {
    if (entries_.size() == kMaxEntries) entries_.pop_back();
    return entries_.emplace_front(std::move(key), std::move(value)).second;
  }

  /// The value of `key`, which compute() returns where it is not known. Valid as that of find().
  template <typename Compute>
  const Value& find_or_compute(Key key, const Compute& compute) {
    if (const Value* known = find(key)) return *known;
    return insert(std::move(key), compute());
  }

 private:
  std::list<std::pair<Key, Value>> entries_;  // the latest first
};

}  // namespace ringattn
