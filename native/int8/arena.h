// Hands out parts of a workspace. Without memory it only counts, so that one function both sizes a workspace
// and divides it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace socflower::int8 {

class Arena {
 public:
  Arena() = default;
  explicit Arena(void* memory)
      : base_(reinterpret_cast<std::uint8_t*>((reinterpret_cast<std::uintptr_t>(memory) + kAlign - 1) / kAlign *
                                              kAlign)) {}

  template <typename T>
  T* take(std::size_t count) {
    T* part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return part;
  }

  // What was taken, and room to align the start.
  std::size_t bytes() const { return used_ + kAlign; }

 private:
  static constexpr std::size_t kAlign = 64;
  std::uint8_t* base_ = nullptr;
  std::size_t used_ = 0;
};

}  // namespace socflower::int8
