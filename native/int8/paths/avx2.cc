#define SOCFLOWER_INT8_NAMESPACE avx2
#include "loops.inc"
#include "block_avx2.h"

namespace socflower::int8 {

extern const Path kAvx2Path;
const Path kAvx2Path = avx2::make_path("avx2", avx2::kGeneral, avx2::kActivations, avx2::kWide);

}  // namespace socflower::int8
