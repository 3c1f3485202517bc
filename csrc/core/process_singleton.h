// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>

#include <new>

namespace ringattn {

/// The one T of this process. Never destroyed: threads may outlive static objects by a moment, and
/// so may what is freed after the driver is gone. A forked child begins with a T of its own:
/// threads are not forked, so a lock that one held would never be released, and operations in
/// flight are the parent's.
template <typename T>
T& process_singleton() {
  static T* const one = [] {
    T* made = new T;
    pthread_atfork(nullptr, nullptr, [] { new (&process_singleton<T>()) T; });
    return made;
  }();
  return *one;
}

}  // namespace ringattn
