#include "registry.h"

#include "../kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace socflower::int8 {

extern const Path kPortablePath;
extern const Path kAvx2Path, kAvxVnniPath, kAvx512VnniPath;
extern const Path kNeonPath, kNeonSdotPath, kNeonI8mmPath;

namespace {

struct Machine {
  bool avx2 = false, avx_vnni = false, avx512_vnni = false;
  bool neon = false, dot_product = false, int8_matrix = false;
};

#if defined(__x86_64__)

Machine probe() {
  Machine machine;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return machine;
  const bool system_saves_vectors = (c >> 27 & 1) != 0;  // OSXSAVE: XGETBV may be used
  if (!system_saves_vectors) return machine;
  unsigned saved, upper;
  __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
  const bool ymm = (saved & 0x06) == 0x06;  // XMM and upper halves of YMM
  const bool zmm = (saved & 0xe6) == 0xe6;  // and opmasks, upper halves of ZMM, ZMM16 to 31
  if (!ymm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return machine;
  const unsigned leaf7_subleaves = a;
  machine.avx2 = (b >> 5 & 1) != 0;
  const unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  machine.avx512_vnni = zmm && machine.avx2 && (b & avx512) == avx512 && (c >> 11 & 1) != 0;
  if (leaf7_subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    machine.avx_vnni = machine.avx2 && (a >> 4 & 1) != 0;
  }
  return machine;
}

#elif defined(__aarch64__) && defined(__linux__)

Machine probe() {
  // Values of the kernel's interface; old headers lack the names.
  constexpr unsigned long kAsimdDp = 1ul << 20, kI8mm = 1ul << 13;  // HWCAP_ASIMDDP, HWCAP2_I8MM
  Machine machine;
  machine.neon = true;
  machine.dot_product = (getauxval(AT_HWCAP) & kAsimdDp) != 0;
  machine.int8_matrix = machine.dot_product && (getauxval(AT_HWCAP2) & kI8mm) != 0;
  return machine;
}

#elif defined(__aarch64__) && defined(__APPLE__)

bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

Machine probe() {
  Machine machine;
  machine.neon = true;
  machine.dot_product = has_feature("hw.optional.arm.FEAT_DotProd");
  machine.int8_matrix = machine.dot_product && has_feature("hw.optional.arm.FEAT_I8MM");
  return machine;
}

#else

Machine probe() {
  Machine machine;
#if defined(__aarch64__)
  machine.neon = true;
#endif
  return machine;
}

#endif

struct Entry {
  const Path* path;
  bool Machine::*needs;  // null: nothing
};

constexpr Entry kCompiled[] = {
    {&kPortablePath, nullptr},
#if defined(SOCFLOWER_HAS_AVX2)
    {&kAvx2Path, &Machine::avx2},
#endif
#if defined(SOCFLOWER_HAS_AVX_VNNI)
    {&kAvxVnniPath, &Machine::avx_vnni},
#endif
#if defined(SOCFLOWER_HAS_AVX512_VNNI)
    {&kAvx512VnniPath, &Machine::avx512_vnni},
#endif
#if defined(SOCFLOWER_HAS_NEON)
    {&kNeonPath, &Machine::neon},
#endif
#if defined(SOCFLOWER_HAS_NEON_SDOT)
    {&kNeonSdotPath, &Machine::dot_product},
#endif
#if defined(SOCFLOWER_HAS_NEON_I8MM)
    {&kNeonI8mmPath, &Machine::int8_matrix},
#endif
};
constexpr int kNumCompiled = sizeof kCompiled / sizeof kCompiled[0];

struct Table {
  const Path* available[kNumCompiled];
  const char* names[kNumCompiled];
  int num_available = 0;

  Table() {
    const Machine machine = probe();
    for (int i = 0; i < kNumCompiled; ++i) {
      const Entry& entry = kCompiled[i];
      names[i] = entry.path->name;
      if (entry.needs == nullptr || machine.*entry.needs) available[num_available++] = entry.path;
    }
  }
};

const Table& table() {
  static const Table instance;
  return instance;
}

}  // namespace

Paths available_paths() { return {table().available, table().num_available}; }

const char* const* compiled_path_names(int* count) {
  *count = kNumCompiled;
  return table().names;
}

}  // namespace socflower::int8
